//! The life of a process: configuration, machines without a driver, forks, its end.
#![expect(unsafe_code, reason = "calls C functions")]

mod common;

use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStringExt;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::{env, ptr};

use common::{CACHING, Fake, TIDE, allocate, is_tide, isolated, last_error};
use lowtide::*;

fn configure(strategy: Option<&CStr>, conf: Option<&CStr>) -> Status {
    let pointer = |text: Option<&CStr>| text.map_or(ptr::null(), CStr::as_ptr);
    // SAFETY: both are null or end with a zero byte.
    unsafe { lowtide_configure(pointer(strategy), pointer(conf)) }
}

#[test]
fn the_configuration_is_settled_by_the_first_request() {
    let test = "the_configuration_is_settled_by_the_first_request";
    isolated(test, &[("LOWTIDE_STRATEGY", "bfc")], |fake| {
        assert_eq!(configure(Some(c"best"), None), Status::Config);
        assert!(
            last_error().starts_with("Unknown strategy 'best'"),
            "{}",
            last_error()
        );
        assert_eq!(
            configure(Some(c"caching"), Some(c"fast:True")),
            Status::Config
        );
        assert_eq!(
            configure(Some(c"caching"), Some(c"expandable_segments:True")),
            Status::Ok
        );
        // SAFETY: the text is valid for ever.
        let config = || unsafe { CStr::from_ptr(lowtide_config()) };
        assert_eq!(config(), c"caching:expandable_segments:True");
        assert_eq!(configure(None, None), Status::Ok, "nobody fixed it");
        assert_eq!(config(), c"bfc");
        let again = configure(Some(c"caching"), Some(c"expandable_segments:True"));
        assert_eq!(again, Status::Ok);
        assert!(allocate(1, 0).is_ok());
        assert_eq!(fake.live().mappings, 1, "a segment that grows was made");
        assert_eq!(configure(None, None), Status::Started);
    });
}

/// If the first and the last quarter of a segment are free, PyTorch 2.12 takes the last.
#[test]
fn blocks_of_a_size_are_taken_as_the_programs_pytorch_takes_them() {
    let test = "blocks_of_a_size_are_taken_as_the_programs_pytorch_takes_them";
    isolated(test, &[CACHING], |_| {
        assert_eq!(lowtide_set_torch_version(2, 12), Status::Ok);
        let quarters = [(); 4].map(|()| allocate(512 << 10, 0).expect("there is memory"));
        for freed in [quarters[0], quarters[3]] {
            assert_eq!(lowtide_deallocate(freed), Status::Ok);
        }
        assert_eq!(allocate(512 << 10, 0), Ok(quarters[3]));
        assert_eq!(lowtide_set_torch_version(2, 13), Status::Started);
        // SAFETY: the text is valid for ever.
        let config = || unsafe { CStr::from_ptr(lowtide_config()) };
        assert_eq!(config(), c"caching", "nobody asked for an order");
        // SAFETY: the texts end with a zero byte.
        let reconfigure = |text: &CStr| unsafe { lowtide_reconfigure(text.as_ptr()) };
        assert_eq!(reconfigure(c""), Status::Ok);
        assert_eq!(config(), c"caching", "nor did these settings");
        assert_eq!(reconfigure(c"free_block_order:block_age"), Status::Ok);
        assert_eq!(reconfigure(c"max_split_size_mb:64"), Status::Ok);
        assert_eq!(reconfigure(c"free_block_order:address"), Status::Config);
    });
}

/// Returns the advice in the text of an out-of-memory error.
fn advice() -> String {
    assert_eq!(allocate(1 << 50, 0), Err(Status::OutOfMemory));
    let text = last_error();
    let advice = text.split_once("reserved by PyTorch but unallocated.");
    advice.expect("as in PyTorch").1.to_owned()
}

/// PyTorch up to 2.13 advises to enable expandable segments even if they are enabled. The newest does not.
#[test]
fn the_text_of_an_error_is_that_of_the_programs_pytorch() {
    let test = "the_text_of_an_error_is_that_of_the_programs_pytorch";
    for minor in ["8", "15"] {
        let variables = [
            ("LOWTIDE_CONF", "expandable_segments:True"),
            ("MINOR", minor),
        ];
        isolated(test, &variables, |_| {
            const TO_ENABLE: &str =
                " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=";
            let minor = env::var("MINOR").expect("it is set").parse();
            let minor = minor.expect("a number");
            assert_eq!(lowtide_set_torch_version(2, minor), Status::Ok);
            let said = advice();
            let (start, document) = if minor == 8 {
                (TO_ENABLE, "#environment-variables) The largest")
            } else {
                (" expandable_segments is enabled.", "_by_class. The largest")
            };
            assert!(said.starts_with(start) && said.contains(document), "{said}");
            // SAFETY: the text ends with a zero byte.
            let status = unsafe { lowtide_reconfigure(c"expandable_segments:False".as_ptr()) };
            assert_eq!(status, Status::Ok);
            let said = advice();
            assert!(said.starts_with(TO_ENABLE), "{said}");
        });
    }
}

/// `tide` does not read the setting that PyTorch advises.
#[test]
fn the_text_of_an_error_advises_nothing_that_has_no_effect() {
    let test = "the_text_of_an_error_advises_nothing_that_has_no_effect";
    isolated(test, &[TIDE], |_| {
        let said = advice();
        assert!(said.starts_with(" The largest free block"), "{said}");
    });
}

fn settings_in_force(given: &CStr) -> CachingSettings {
    let mut settings = CachingSettings::default();
    // SAFETY: the text ends with a zero byte, and the settings may be written to.
    let status = unsafe { lowtide_settings_in_force(given.as_ptr(), &raw mut settings) };
    assert_eq!(status, Status::Ok);
    settings
}

const GIVEN: &str = "expandable_segments:True,max_split_size_mb:64,garbage_collection_threshold:0.5,\
                     roundup_power2_divisions:[1:2,>:4],graph_capture_record_stream_reuse:True";

/// PyTorch 2.8 and 2.9 do not read `PYTORCH_ALLOC_CONF`, and no release reads `LOWTIDE_CONF`.
#[test]
fn the_settings_in_force_are_those_that_lowtide_was_given() {
    let test = "the_settings_in_force_are_those_that_lowtide_was_given";
    for variable in [
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "LOWTIDE_CONF",
    ] {
        isolated(test, &[(variable, GIVEN)], |_| {
            let given = CString::new(GIVEN).expect("a text");
            let mut divisions = [4; 16];
            divisions[0] = 2;
            let expected = CachingSettings {
                max_split_size: 64 << 20,
                garbage_collection_threshold: 0.5,
                roundup_power2_divisions: divisions,
                expandable_segments: true,
                graph_capture_record_stream_reuse: true,
                are_given: true,
            };
            assert_eq!(settings_in_force(&given), expected);
            let not_given = CachingSettings {
                are_given: false,
                ..expected
            };
            assert_eq!(settings_in_force(c""), not_given);
            assert_eq!(settings_in_force(c"not a text"), not_given);
            // SAFETY: the text ends with a zero byte.
            let status = unsafe { lowtide_reconfigure(c"expandable_segments:False".as_ptr()) };
            assert_eq!(status, Status::Ok);
            let changed = CachingSettings {
                max_split_size: u64::MAX,
                graph_capture_record_stream_reuse: true,
                ..CachingSettings::default()
            };
            assert_eq!(settings_in_force(&given), changed);
        });
    }
}

#[test]
fn another_strategy_has_none_of_pytorchs_settings() {
    let test = "another_strategy_has_none_of_pytorchs_settings";
    let variables = [
        ("LOWTIDE_STRATEGY", "bfc"),
        ("PYTORCH_CUDA_ALLOC_CONF", GIVEN),
    ];
    isolated(test, &variables, |_| {
        let defaults = CachingSettings {
            max_split_size: u64::MAX,
            ..CachingSettings::default()
        };
        assert_eq!(settings_in_force(c""), defaults);
    });
}

#[test]
fn a_configuration_that_is_refused_is_not_settled() {
    isolated(
        "a_configuration_that_is_refused_is_not_settled",
        &[("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:banana")],
        |_| {
            assert_eq!(allocate(1, 0), Err(Status::Config));
            assert_eq!(
                configure(None, Some(c"")),
                Status::Ok,
                "it is not settled yet"
            );
            assert!(allocate(1, 0).is_ok());
        },
    );
}

/// Returns lowtide's lines on standard error from a child process. It runs one test of this file with the
/// variable `child` set, and with an unknown strategy.
fn reported_by(test: &str, child: &str) -> Vec<String> {
    let output = Command::new(std::env::current_exe().expect("a test is a program"))
        .args(["--exact", test, "--nocapture"])
        .env(child, "1")
        .env("LOWTIDE_STRATEGY", "tied")
        .output()
        .expect("it can be started");
    assert!(output.status.success());
    lines_of_lowtide(&output)
}

fn lines_of_lowtide(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stderr);
    let lines = text.lines().filter(|line| line.starts_with("lowtide: "));
    lines.map(str::to_owned).collect()
}

/// A variable must be 0 or 1. Another value gives a warning.
#[test]
fn what_is_neither_0_nor_1_is_reported_once() {
    const TEST: &str = "what_is_neither_0_nor_1_is_reported_once";
    const CHILD: &str = "LOWTIDE_TEST_SWITCHES";
    if std::env::var_os(CHILD).is_some() {
        let _driver = Fake::load();
        for _ in 0..2 {
            // SAFETY: the tag ends with a zero byte.
            let entered = unsafe { lowtide_region_enter(c"kv".as_ptr(), Backup::Host as c_int) };
            assert_eq!(entered, Status::Ok);
            assert!(allocate(1 << 20, 0).is_ok());
            assert_eq!(lowtide_region_leave(), Status::Ok);
            // SAFETY: a null pointer means every region.
            assert_eq!(unsafe { lowtide_pause(ptr::null()) }, Status::Ok);
            // SAFETY: likewise.
            assert_eq!(unsafe { lowtide_resume(ptr::null()) }, Status::Ok);
        }
        return;
    }
    let reported = |value: &str| {
        let mut child = common::command(TEST);
        let variables = ["LOWTIDE_RETAIN_BACKUPS", "LOWTIDE_PUBLISH"].map(|name| (name, value));
        let output = child.env(CHILD, "1").envs(variables).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        lines_of_lowtide(&output)
    };
    assert_eq!(
        reported("yes"),
        [
            "lowtide: LOWTIDE_PUBLISH is 'yes', and can be 0 or 1; it is taken for 1",
            "lowtide: LOWTIDE_RETAIN_BACKUPS is 'yes', and can be 0 or 1; it is taken for 0",
        ]
    );
    for value in ["", "0", "1"] {
        assert_eq!(reported(value), [""; 0]);
    }
}

/// PyTorch does not query why its pluggable allocator returned null.
#[test]
fn a_malloc_that_fails_says_why_on_standard_error() {
    const CHILD: &str = "LOWTIDE_TEST_MALLOC_FAILS";
    if std::env::var_os(CHILD).is_some() {
        assert!(lowtide_malloc(1, 0, ptr::null_mut()).is_null());
        return;
    }
    let lines = reported_by("a_malloc_that_fails_says_why_on_standard_error", CHILD);
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(
        lines[0].starts_with("lowtide: Unknown strategy 'tied'"),
        "{lines:?}"
    );
}

/// PyTorch does not check the results of its hooks either, and may call them a thousand times a second.
#[test]
fn a_hook_that_fails_says_why_once_a_kind() {
    const CHILD: &str = "LOWTIDE_TEST_HOOKS_FAIL";
    if std::env::var_os(CHILD).is_some() {
        let unknown = ptr::without_provenance_mut(4096);
        for _ in 0..3 {
            let status = lowtide_hook_record_stream(unknown, ptr::null_mut());
            assert_eq!(status, Status::NotAllocated);
            let status = lowtide_hook_set_memory_fraction(2.0, 0);
            assert_eq!(status, Status::InvalidArgument);
            assert_eq!(lowtide_hook_set_memory_fraction(0.5, 0), Status::Config);
            // These report to their caller by the status.
            let status = lowtide_record_stream(ptr::without_provenance_mut(8192), ptr::null_mut());
            assert_eq!(status, Status::NotAllocated);
            let status = lowtide_set_memory_fraction(3.0, 0);
            assert_eq!(status, Status::InvalidArgument);
        }
        return;
    }
    let lines = reported_by("a_hook_that_fails_says_why_once_a_kind", CHILD);
    let beginnings = [
        "lowtide: 0x1000 ",
        "lowtide: 2 is not a fraction",
        "lowtide: Unknown strategy",
    ];
    assert_eq!(lines.len(), beginnings.len(), "{lines:?}");
    for (line, beginning) in lines.iter().zip(beginnings) {
        assert!(line.starts_with(beginning), "{lines:?}");
    }
}

#[test]
fn a_limit_is_kept_and_reported() {
    isolated(
        "a_limit_is_kept_and_reported",
        &[("FAKECUDA_CAPACITY", "1073741824")],
        |_| {
            let fraction = || {
                let mut fraction = -1.0;
                // SAFETY: `fraction` may be written to.
                let status = unsafe { lowtide_get_memory_fraction(0, &raw mut fraction) };
                assert_eq!(status, Status::Ok);
                fraction
            };
            assert_eq!(fraction(), 1.0);
            assert_eq!(lowtide_set_memory_fraction(0.25, 0), Status::Ok);
            assert_eq!(fraction(), 0.25);
            for wrong in [1.5, -0.1, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let status = lowtide_set_memory_fraction(wrong, 0);
                assert_eq!(status, Status::InvalidArgument, "{wrong}");
            }
            assert_eq!(fraction(), 0.25);
            assert_eq!(allocate(300 << 20, 0), Err(Status::OutOfMemory));
            let text = last_error();
            assert!(
                text.starts_with("CUDA out of memory. Tried to allocate 300.00 MiB. GPU 0"),
                "{text}"
            );
            assert!(text.contains("256.00 MiB allowed"), "{text}");
            assert!(allocate(200 << 20, 0).is_ok());
            let (mut free, mut total) = (0, 0);
            // SAFETY: both may be written to.
            let status = unsafe { lowtide_memory_info(0, &raw mut free, &raw mut total) };
            assert_eq!(status, Status::Ok);
            assert_eq!((free, total), (824 << 20, 1 << 30));
        },
    );
}

#[test]
fn a_snapshot_can_be_read() {
    isolated(
        "a_snapshot_can_be_read",
        &[("FAKECUDA_DEVICES", "2")],
        |_| {
            let memory = allocate(3 << 20, 1).unwrap();
            let (mut bytes, mut length) = (ptr::null_mut(), 0);
            // SAFETY: both may be written to.
            let status = unsafe { lowtide_snapshot(&raw mut bytes, &raw mut length) };
            assert_eq!(status, Status::Ok);
            // SAFETY: `length` bytes are valid until they are released.
            let pickle = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), length) };
            let snapshot = lowtide_trace::read_from(pickle).unwrap();
            // SAFETY: they come from `lowtide_snapshot`.
            unsafe { lowtide_release_bytes(bytes) };
            let trace = snapshot
                .traces
                .iter()
                .find(|trace| trace.device == 1)
                .unwrap();
            let segment = &trace.segments[0];
            assert_eq!(segment.address.get(), memory.addr() as u64);
            assert_eq!(segment.allocated_bytes().get(), 3 << 20);
        },
    );
}

#[test]
fn the_child_of_a_fork_gets_an_error() {
    isolated("the_child_of_a_fork_gets_an_error", &[], |fake| {
        let memory = allocate(1 << 20, 0).unwrap();
        let calls = fake.memory_calls();
        fake.use_device(0);
        assert_eq!(lowtide_current_device(), 0);
        let in_child = || {
            let asked = fake.calls("cuCtxGetCurrent");
            assert_eq!(lowtide_current_device(), -1);
            assert!(last_error().contains("'spawn'"));
            assert_eq!(fake.calls("cuCtxGetCurrent"), asked);
            assert_eq!(allocate(1, 0), Err(Status::Forked));
            assert!(last_error().contains("'spawn'"));
            assert_eq!(allocate(1, 1), Err(Status::Forked), "nor on another device");
            assert_eq!(lowtide_deallocate(memory), Status::Forked);
            lowtide_free(memory, 1 << 20, 0, ptr::null_mut());
            assert_eq!(lowtide_reset(), Status::Forked);
            assert_eq!(lowtide_init(1), Status::Forked);
            assert_eq!(configure(None, None), Status::Forked);
            refuses_new_functions(memory);
        };
        // SAFETY: the child calls only the functions below, and ends with `_exit`.
        match unsafe { libc::fork() } {
            0 => {
                let code = i32::from(std::panic::catch_unwind(in_child).is_err());
                // SAFETY: the child must not run the parent's exit handlers.
                unsafe { libc::_exit(code) }
            }
            child => {
                let mut status = -1;
                // SAFETY: `status` may be written to.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                assert_eq!(status, 0);
            }
        }
        assert_eq!(lowtide_deallocate(memory), Status::Ok, "the parent goes on");
        assert!(allocate(30 << 20, 0).is_ok());
        let of_pages = if is_tide() { 14 } else { 1 };
        assert_eq!(fake.memory_calls(), calls + of_pages);
    });
}

fn refuses_new_functions(memory: *mut c_void) {
    let pool = Mempool {
        capture: 0,
        user: 1,
    };
    assert_eq!(common::find(memory), Err(Status::Forked));
    assert_eq!(lowtide_retain_pool(0, pool), Status::Forked);
    assert_eq!(lowtide_capture_begin(0), Status::Forked);
    assert_eq!(lowtide_keep_stream(0, ptr::null_mut()), Status::Forked);
    assert!(lowtide_config().is_null());
    let null = ptr::null_mut();
    // SAFETY: no function is given.
    let observed = unsafe { lowtide_observe_events(None, null) };
    // SAFETY: as above.
    let shortage = unsafe { lowtide_on_shortage(None, null) };
    // SAFETY: the text ends with a zero byte.
    let settings = unsafe { lowtide_reconfigure(c"".as_ptr()) };
    let mut taken = ptr::null_mut();
    // SAFETY: `taken` may be written to.
    let checkpoint = unsafe { lowtide_checkpoint_pool(0, pool, &raw mut taken) };
    let mut address = ptr::null();
    // SAFETY: `address` may be written to.
    let copy = unsafe { lowtide_backup_find(memory, &raw mut address, ptr::null_mut()) };
    // SAFETY: there is nothing to write to.
    let refused_first = unsafe { lowtide_backup_find(memory, ptr::null_mut(), ptr::null_mut()) };
    let all = [
        observed,
        shortage,
        settings,
        checkpoint,
        copy,
        refused_first,
    ];
    assert_eq!(all, [Status::Forked; 6]);
    assert!(tms_get_cpu_backup_pointer(memory.cast(), 1).is_null());
    assert!(last_error().contains("'spawn'"), "{}", last_error());
}

#[test]
fn a_fork_before_the_driver_starts_is_fine() {
    isolated("a_fork_before_the_driver_starts_is_fine", &[], |_| {
        assert_eq!(configure(Some(c"bfc"), None), Status::Ok);
        // SAFETY: the child calls only the functions below, and ends with `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::from(allocate(1, 0).is_err());
            // SAFETY: the child must not run the parent's exit handlers.
            unsafe { libc::_exit(code) }
        }
        let mut status = -1;
        // SAFETY: `status` may be written to.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    });
}

/// Other libraries may free memory when the process ends, after the driver has shut down.
#[test]
fn memory_may_be_freed_after_the_driver_has_ended() {
    static LATE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    extern "C" fn free_at_exit() {
        let memory = LATE.load(Ordering::Relaxed);
        let is_gone = allocate(1, 0) == Err(Status::Driver);
        if !is_gone || lowtide_deallocate(memory) != Status::Ok {
            eprintln!("{}", last_error());
            // SAFETY: the process is ending.
            unsafe { libc::_exit(1) }
        }
    }
    let test = "memory_may_be_freed_after_the_driver_has_ended";
    isolated(test, &[("LOWTIDE_STRATEGY", "direct")], |_| {
        // Registered before the driver's own handler, so that it runs after it.
        // SAFETY: the function exists until the process ends.
        assert_eq!(unsafe { libc::atexit(free_at_exit) }, 0);
        LATE.store(allocate(1 << 20, 0).unwrap(), Ordering::Relaxed);
    });
}

/// The library has threads that run, and the process's allocators.
#[test]
fn whoever_closes_the_library_leaves_it_loaded() {
    isolated("whoever_closes_the_library_leaves_it_loaded", &[], |_| {
        let path = std::env::current_exe()
            .unwrap()
            .with_file_name("liblowtide.so");
        // SAFETY: its initializers may run in any process.
        let library = unsafe { libloading::Library::new(&path) }.unwrap();
        library.close().unwrap();
        let path = CString::new(path.into_os_string().into_vec()).unwrap();
        let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
        // SAFETY: the path ends with a zero byte, and nothing is loaded.
        let loaded = unsafe { libc::dlopen(path.as_ptr(), flags) };
        assert!(!loaded.is_null());
    });
}

/// The C program calls the functions of the header in the shared object.
#[test]
fn a_c_program_runs() {
    let directory = std::env::current_exe().unwrap();
    let directory = directory.parent().unwrap();
    let built = directory.join(format!("smoke-{}", std::process::id()));
    let root = env!("CARGO_MANIFEST_DIR");
    let compiled = Command::new("cc")
        .args([
            "-std=c99",
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-I",
        ])
        .arg(format!("{root}/include"))
        .arg(format!("{root}/tests/c/smoke.c"))
        .arg("-L")
        .arg(directory)
        .args(["-llowtide", "-ldl", "-o"])
        .arg(&built)
        .output()
        .expect("cc starts");
    let text = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{text}");
    let ran = Command::new(&built)
        .arg(common::library_path())
        .env("LD_LIBRARY_PATH", directory)
        .output()
        .unwrap();
    std::fs::remove_file(&built).unwrap();
    let text = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{}: {text}", ran.status);
}
