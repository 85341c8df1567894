//! Memory that other processes use: each test is two or three processes with a stand-in driver each, which
//! do what the test tells them. What a card adds is not covered: there another process's memory is a range
//! of the card's and not a file.
#![expect(unsafe_code, reason = "calls C functions")]

mod common;

use std::env;
use std::ffi::{c_int, c_void};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio, exit};
use std::ptr;

use common::{Fake, Live, allocate, check, command, fill, last_error};
use lowtide::*;

/// The part that a process plays.
const ROLE: &str = "LOWTIDE_TEST_ROLE";
const EXPANDABLE: (&str, &str) = ("LOWTIDE_CONF", "expandable_segments:True");
const KINDS: [(&str, &str); 2] = [EXPANDABLE, ("LOWTIDE_CONF", "")];
const MIB: usize = 1 << 20;

type Role = fn(&Fake);

/// Plays the role that this process was started for, or else `direct`s the others.
fn play(roles: &[(&str, Role)], direct: impl FnOnce()) {
    let Some(role) = env::var_os(ROLE) else {
        return direct();
    };
    let (_, play) = roles.iter().find(|(name, _)| *name == role).unwrap();
    play(&Fake::load());
    exit(0);
}

/// Another process of the test.
struct Other {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Other {
    fn start(test: &str, role: &str, variables: &[(&str, &str)]) -> Other {
        let mut child = command(test)
            .env(ROLE, role)
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Other {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    /// Returns what it says next.
    fn hear(&mut self) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some(said) = line.strip_prefix("@ ") {
                return said.trim_end().to_owned();
            }
            line.clear();
        }
        let mut errors = String::new();
        let stderr = self.child.stderr.take().unwrap();
        std::io::Read::read_to_string(&mut BufReader::new(stderr), &mut errors).unwrap();
        panic!("it ended: {errors}");
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Tells it something and returns the answer.
    fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.hear()
    }

    /// Lets it end by itself. Returns what it wrote to standard error.
    fn finish(mut self) -> String {
        drop(self.input.take());
        let output = self.child.wait_with_output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{errors}");
        errors
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Says something to the process that directs.
fn say(text: &str) {
    let mut output = std::io::stdout();
    // The test harness may be in the middle of a line.
    writeln!(output, "\n@ {text}").unwrap();
    output.flush().unwrap();
}

/// Returns what the process that directs tells next, `None` at the end.
fn told() -> Option<String> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    (!line.is_empty()).then(|| line.trim_end().to_owned())
}

/// Returns the bytes as text, and the offset.
fn share(memory: *mut c_void) -> Result<(String, usize), Status> {
    let (mut bytes, mut length, mut offset) = (ptr::dangling_mut(), 77, 78);
    // SAFETY: all three may be written to.
    let status = unsafe { lowtide_share(memory, &raw mut bytes, &raw mut length, &raw mut offset) };
    if status != Status::Ok {
        assert_eq!((bytes, length, offset), (ptr::dangling_mut(), 77, 78));
        return Err(status);
    }
    let mut text = String::new();
    // SAFETY: so many bytes are there until they are released.
    for byte in unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), length) } {
        write!(text, "{byte:02x}").unwrap();
    }
    // SAFETY: they come from `lowtide_share`.
    unsafe { lowtide_release_bytes(bytes) };
    Ok((text, usize::try_from(offset).unwrap()))
}

fn attach(text: &str, device: c_int) -> Result<*mut c_void, Status> {
    let digits = text.as_bytes().chunks_exact(2);
    let byte = |digits: &[u8]| u8::from_str_radix(str::from_utf8(digits).unwrap(), 16).unwrap();
    let bytes: Vec<u8> = digits.map(byte).collect();
    let untouched = ptr::dangling_mut::<c_void>();
    let mut memory = untouched;
    let start = bytes.as_ptr().cast();
    // SAFETY: the bytes may be read, and `memory` written to.
    match unsafe { lowtide_attach(device, start, bytes.len(), &raw mut memory) } {
        Status::Ok => Ok(memory),
        status => {
            assert_eq!(memory, untouched, "a failure leaves it as it was");
            Err(status)
        }
    }
}

fn behind(memory: *mut c_void, offset: usize) -> *mut c_void {
    memory.wrapping_byte_add(offset)
}

/// Says `bytes offset` for each size, filled with its index, then `ok` to everything until the end.
fn export(fake: &Fake) {
    let _ = fake;
    let sizes = told().unwrap();
    let sizes = sizes.split(' ').map(|size| size.parse().unwrap());
    let blocks: Vec<(*mut c_void, usize)> = sizes
        .map(|size| (allocate(size, 0).unwrap(), size))
        .collect();
    for (seed, &(memory, size)) in blocks.iter().enumerate() {
        // A few pages of what is large are enough.
        fill(memory, size.min(MIB), seed);
        let (bytes, offset) = share(memory).unwrap_or_else(|_| panic!("{}", last_error()));
        say(&format!("{bytes} {offset}"));
    }
    while let Some(line) = told() {
        match line.as_str() {
            // Whether the importer wrote to the blocks.
            "check" => {
                for (seed, &(memory, size)) in blocks.iter().enumerate() {
                    check(memory, size.min(MIB), seed + 100);
                }
            }
            "free" => {
                for &(memory, _) in &blocks {
                    assert_eq!(lowtide_deallocate(memory), Status::Ok);
                }
                assert_eq!(lowtide_reset(), Status::Ok);
            }
            _ => unreachable!(),
        }
        say("ok");
    }
}

/// Starts an exporter of blocks of these sizes. Returns what it shared.
fn exporter(test: &str, kind: (&str, &str), sizes: &[usize]) -> (Other, Vec<(String, usize)>) {
    let mut other = Other::start(test, "export", &[kind, ("FAKECUDA_DEVICES", "2")]);
    let text: Vec<String> = sizes.iter().map(usize::to_string).collect();
    other.tell(&text.join(" "));
    let shared = sizes.iter().map(|_| {
        let line = other.hear();
        let (bytes, offset) = line.split_once(' ').unwrap();
        (bytes.to_owned(), offset.parse().unwrap())
    });
    let shared = shared.collect();
    (other, shared)
}

/// Does what it is told: `attach DEVICE BYTES`, `detach ADDRESS`, `check ADDRESS SIZE SEED`,
/// `fill ADDRESS SIZE SEED`, `live`. Says the address, or the status and the last error.
fn import(fake: &Fake) {
    while let Some(line) = told() {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |index: usize| words[index].parse::<usize>().unwrap();
        let memory = |index: usize| ptr::with_exposed_provenance_mut::<c_void>(number(index));
        let status = match words[0] {
            "attach" => match attach(words.get(2).unwrap_or(&""), words[1].parse().unwrap()) {
                Ok(memory) => {
                    say(&memory.expose_provenance().to_string());
                    continue;
                }
                Err(status) => status,
            },
            "detach" => lowtide_detach(memory(1)),
            "check" => {
                check(memory(1), number(2), number(3));
                Status::Ok
            }
            "fill" => {
                fill(memory(1), number(2), number(3));
                Status::Ok
            }
            "live" => {
                say(&described(&fake.live()));
                continue;
            }
            _ => unreachable!(),
        };
        match status {
            Status::Ok => say("ok"),
            status => say(&format!("{status:?} {}", last_error())),
        }
    }
}

/// Returns what is left of another process's memory.
fn described(live: &Live) -> String {
    format!(
        "{} allocations, {} reservations, {} handles, {} mappings",
        live.allocations, live.reservations, live.handles, live.mappings
    )
}

const NOTHING: &str = "0 allocations, 0 reservations, 0 handles, 0 mappings";
const ROLES: [(&str, Role); 2] = [("export", export), ("import", import)];

fn importer(test: &str, variables: &[(&str, &str)]) -> Other {
    let mut all = vec![("FAKECUDA_DEVICES", "2")];
    all.extend_from_slice(variables);
    Other::start(test, "import", &all)
}

#[test]
fn contents_cross_processes_both_ways() {
    let test = "contents_cross_processes_both_ways";
    play(&ROLES, || {
        for kind in KINDS {
            // Two in one page, and one in pages of its own.
            let sizes = [64 << 10, 5 << 10, 30 * MIB];
            let (mut exporter, shared) = exporter(test, kind, &sizes);
            assert_eq!(shared[0].0, shared[1].0, "one segment, the same bytes");
            assert_ne!(shared[0].1, shared[1].1);
            assert_ne!(shared[0].0, shared[2].0);
            let mut importer = importer(test, &[]);
            let mut addresses = Vec::new();
            for (seed, ((bytes, offset), size)) in shared.iter().zip(sizes).enumerate() {
                let start: usize = importer.ask(&format!("attach 0 {bytes}")).parse().unwrap();
                let (address, size) = (start + offset, size.min(MIB));
                assert_eq!(
                    importer.ask(&format!("check {address} {size} {seed}")),
                    "ok"
                );
                let new = seed + 100;
                assert_eq!(importer.ask(&format!("fill {address} {size} {new}")), "ok");
                addresses.push(start);
            }
            assert_eq!(addresses[0], addresses[1], "attached once");
            assert_ne!(addresses[0], addresses[2]);
            assert_eq!(exporter.ask("check"), "ok");

            for start in addresses {
                assert_eq!(importer.ask(&format!("detach {start}")), "ok");
            }
            assert_eq!(importer.ask("live"), NOTHING);
            assert_eq!(importer.finish(), "");
            assert_eq!(exporter.ask("free"), "ok");
            assert_eq!(
                exporter.finish(),
                "",
                "nothing is called after the driver is gone"
            );
        }
    });
}

#[test]
fn the_same_bytes_are_attached_once_and_counted() {
    let test = "the_same_bytes_are_attached_once_and_counted";
    play(&ROLES, || {
        for kind in KINDS {
            let (exporter, shared) = exporter(test, kind, &[3 * MIB]);
            let (bytes, offset) = &shared[0];
            let mut importer = importer(test, &[]);
            let attach = format!("attach 0 {bytes}");
            let address: usize = importer.ask(&attach).parse().unwrap();
            assert_eq!(importer.ask(&attach), address.to_string());
            let detach = format!("detach {address}");
            assert_eq!(importer.ask(&detach), "ok");
            let check = format!("check {} {MIB} 0", address + offset);
            assert_eq!(importer.ask(&check), "ok", "it is still there");
            assert_eq!(importer.ask(&attach), address.to_string());
            assert_eq!(importer.ask(&detach), "ok");
            assert_eq!(importer.ask(&detach), "ok");
            assert_eq!(importer.ask("live"), NOTHING);
            let answer = importer.ask(&detach);
            assert!(answer.starts_with("NotAllocated"), "{answer}");
            let again: usize = importer.ask(&attach).parse().unwrap();
            let check = format!("check {} {MIB} 0", again + offset);
            assert_eq!(importer.ask(&check), "ok");
            assert_eq!(importer.ask(&format!("detach {again}")), "ok");
            importer.finish();
            exporter.finish();
        }
    });
}

/// More handles than a message carries.
#[test]
fn a_large_block_crosses_in_several_messages() {
    let test = "a_large_block_crosses_in_several_messages";
    play(&ROLES, || {
        let size = 1400 * MIB;
        let (exporter, shared) = exporter(test, EXPANDABLE, &[size]);
        let mut importer = importer(test, &[]);
        let start: usize = importer
            .ask(&format!("attach 0 {}", shared[0].0))
            .parse()
            .unwrap();
        let address = start + shared[0].1;
        assert_eq!(importer.ask(&format!("check {address} {MIB} 0")), "ok");
        // The last handle is mapped, and accessible.
        let end = address + size - MIB;
        assert_eq!(importer.ask(&format!("fill {end} {MIB} 7")), "ok");
        assert_eq!(
            importer.ask("live"),
            "0 allocations, 1 reservations, 0 handles, 70 mappings"
        );
        assert_eq!(importer.ask(&format!("detach {start}")), "ok");
        assert_eq!(importer.ask("live"), NOTHING);
        importer.finish();
        exporter.finish();
    });
}

#[test]
fn pages_outlive_the_process_that_shared_them() {
    let test = "pages_outlive_the_process_that_shared_them";
    play(&ROLES, || {
        let (exporter, shared) = exporter(test, EXPANDABLE, &[3 * MIB, 40 * MIB]);
        let mut importer = importer(test, &[]);
        let start: usize = importer
            .ask(&format!("attach 0 {}", shared[0].0))
            .parse()
            .unwrap();
        exporter.kill();
        let address = start + shared[0].1;
        assert_eq!(importer.ask(&format!("check {address} {MIB} 0")), "ok");
        let late = importer.ask(&format!("attach 0 {}", shared[1].0));
        assert!(late.starts_with("InvalidArgument process "), "{late}");
        assert!(late.contains("has ended"), "{late}");
        assert_eq!(importer.ask(&format!("detach {start}")), "ok");
        assert_eq!(importer.ask("live"), NOTHING);
        importer.finish();
    });
}

#[test]
fn pages_that_went_back_are_refused() {
    let test = "pages_that_went_back_are_refused";
    play(&ROLES, || {
        let (mut exporter, shared) = exporter(test, EXPANDABLE, &[3 * MIB]);
        assert_eq!(exporter.ask("free"), "ok");
        let mut importer = importer(test, &[]);
        let answer = importer.ask(&format!("attach 0 {}", shared[0].0));
        assert!(answer.contains("has given it back since"), "{answer}");
        assert_eq!(importer.ask("live"), NOTHING);
        importer.finish();
        exporter.finish();
    });
}

#[test]
fn bytes_that_are_not_right_are_refused() {
    let test = "bytes_that_are_not_right_are_refused";
    play(&ROLES, || {
        for kind in KINDS {
            let (exporter, shared) = exporter(test, kind, &[3 * MIB]);
            let bytes = &shared[0].0;
            let mut importer = importer(test, &[]);
            let start = importer.ask(&format!("attach 0 {bytes}"));
            assert_eq!(importer.ask(&format!("detach {start}")), "ok", "these are");
            let mut refused = |bytes: &str, status: &str| {
                let answer = importer.ask(&format!("attach 0 {bytes}"));
                assert!(answer.starts_with(status), "{bytes}: {answer}");
                assert_eq!(importer.ask("live"), NOTHING);
            };
            for length in (0..bytes.len()).step_by(2) {
                refused(&bytes[..length], "InvalidArgument");
            }
            refused(&format!("{bytes}00"), "InvalidArgument");
            // Every byte, one at a time, but the exporter's number, which is for people, and what of an
            // allocation's name is the driver's to understand.
            let all = bytes.len() / 2;
            let end = if kind == EXPANDABLE { all } else { 41 + 16 };
            for index in (0..end).filter(|index| kind != EXPANDABLE || !(41..45).contains(index)) {
                let digit = 2 * index;
                let flipped = if &bytes[digit..=digit] == "0" {
                    "8"
                } else {
                    "0"
                };
                let other = format!("{}{flipped}{}", &bytes[..digit], &bytes[digit + 1..]);
                let answer = importer.ask(&format!("attach 0 {other}"));
                let is_refused =
                    answer.starts_with("InvalidArgument") || answer.starts_with("Driver");
                // Only the exporter's own name may be another's: an allocation is found without it.
                let is_name = kind != EXPANDABLE && (9..25).contains(&index);
                assert!(is_refused || is_name, "byte {index}: {answer}");
                if let Ok(address) = answer.parse::<usize>() {
                    assert_eq!(importer.ask(&format!("detach {address}")), "ok");
                }
                assert_eq!(importer.ask("live"), NOTHING);
            }
            importer.finish();
            exporter.finish();
        }
    });
}

#[test]
fn a_process_does_not_attach_its_own_memory() {
    let test = "a_process_does_not_attach_its_own_memory";
    for kind in KINDS {
        common::isolated(test, &[kind], |_| {
            let memory = allocate(3 << 20, 0).unwrap();
            let (bytes, _) = share(memory).unwrap();
            assert_eq!(attach(&bytes, 0), Err(Status::InvalidArgument));
            assert!(last_error().contains("of this process"), "{}", last_error());
            let inside = behind(memory, 512);
            assert_eq!(share(inside), Err(Status::NotAllocated));
            assert_eq!(share(ptr::null_mut()), Err(Status::NotAllocated));
            assert_eq!(lowtide_detach(memory), Status::NotAllocated);
        });
    }
}

/// The exporter forks, and is killed: its child has the socket's number, and no thread.
#[test]
fn the_child_of_a_fork_neither_shares_nor_answers() {
    fn forks(_: &Fake) {
        let memory = allocate(3 << 20, 0).unwrap();
        let (bytes, _) = share(memory).unwrap();
        let in_child = || {
            assert_eq!(share(memory), Err(Status::Forked));
            assert_eq!(attach(&bytes, 0), Err(Status::Forked));
            assert_eq!(lowtide_detach(memory), Status::Forked);
            assert_eq!(lowtide_enable_peer_access(0, 1), Status::Forked);
        };
        // SAFETY: the child calls only what follows.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::from(std::panic::catch_unwind(in_child).is_err());
            say(&format!("child {} {code}", std::process::id()));
            // It lives on until the test lets it go, and ends as programs do.
            std::thread::sleep(std::time::Duration::from_secs(600));
            exit(1);
        }
        say(&bytes);
        let mut status = -1;
        // SAFETY: `status` may be written to.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
    }
    let test = "the_child_of_a_fork_neither_shares_nor_answers";
    play(&[("forks", forks), ("import", import)], || {
        let mut exporter = Other::start(test, "forks", &[EXPANDABLE]);
        let mut said = [exporter.hear(), exporter.hear()];
        said.sort_by_key(|line| !line.starts_with("child "));
        let [child, bytes] = said;
        let (number, code) = child["child ".len()..].split_once(' ').unwrap();
        assert_eq!(code, "0");
        let mut importer = importer(test, &[]);
        let start: usize = importer.ask(&format!("attach 0 {bytes}")).parse().unwrap();
        assert_eq!(importer.ask(&format!("detach {start}")), "ok");
        exporter.kill();
        let answer = importer.ask(&format!("attach 0 {bytes}"));
        // SAFETY: the child is this test's.
        assert_eq!(
            unsafe { libc::kill(number.parse().unwrap(), libc::SIGKILL) },
            0
        );
        assert!(answer.contains("has ended"), "{answer}");
        importer.finish();
    });
}

/// A child ends as programs do, with its exit handlers, while its parent's thread is at work.
#[test]
fn the_child_of_a_fork_ends() {
    let test = "the_child_of_a_fork_ends";
    common::isolated(test, &[EXPANDABLE], |_| {
        share(allocate(3 << 20, 0).unwrap()).unwrap();
        for _ in 0..20 {
            // SAFETY: the child only ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: as above.
                unsafe { libc::exit(0) };
            }
            let mut status = -1;
            // SAFETY: `status` may be written to.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0);
        }
    });
}

#[test]
fn the_card_is_found_by_its_identity() {
    let test = "the_card_is_found_by_its_identity";
    play(&ROLES, || {
        for kind in KINDS {
            let (exporter, shared) = exporter(test, kind, &[3 * MIB]);
            let (bytes, offset) = &shared[0];
            let visible = |list: &'static str| importer(test, &[("FAKECUDA_VISIBLE", list)]);

            // The exporter's first device is the importer's second.
            for device in [1, 0] {
                let mut importer = visible("1,0");
                let start: usize = importer
                    .ask(&format!("attach {device} {bytes}"))
                    .parse()
                    .unwrap();
                let check = format!("check {} {MIB} 0", start + offset);
                assert_eq!(importer.ask(&check), "ok");
                assert_eq!(importer.ask(&format!("detach {start}")), "ok");
                importer.finish();
            }
            let mut importer = visible("1");
            let answer = importer.ask(&format!("attach 0 {bytes}"));
            assert!(
                answer.starts_with("InvalidArgument the memory is on GPU-"),
                "{answer}"
            );
            assert!(answer.contains("CUDA_VISIBLE_DEVICES"), "{answer}");
            importer.finish();
            exporter.finish();
        }
    });
}

/// What attaching and detaching call.
const CALLS: [&str; 16] = [
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetUuid_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle",
    "cuMemAddressReserve",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemRelease",
    "cuCtxSynchronize",
    "cuMemUnmap",
    "cuMemAddressFree",
];

/// Every call that attaching and detaching make fails once.
#[test]
fn a_call_that_fails_once_leaves_nothing_attached() {
    fn fails(fake: &Fake) {
        let bytes = told().unwrap();
        // The device is ready for use before.
        let held = allocate(512, 0).unwrap();
        let before = described(&fake.live());
        while let Some(line) = told() {
            let (call, nth) = line.split_once(' ').unwrap();
            fake.fail(call, nth.parse().unwrap(), 999);
            let mut failures = 0;
            let start = match attach(&bytes, 0) {
                Ok(start) => start,
                Err(status) => {
                    assert_eq!(status, Status::Driver, "{}", last_error());
                    assert_eq!(described(&fake.live()), before, "{line}: {}", last_error());
                    failures += 1;
                    attach(&bytes, 0).unwrap()
                }
            };
            if lowtide_detach(start) != Status::Ok {
                failures += 1;
                assert_eq!(lowtide_detach(start), Status::Ok, "{}", last_error());
            }
            assert_eq!(described(&fake.live()), before, "{line}");
            assert!(failures <= 1);
            fake.fail_none();
            // Attached and detached anew.
            let start = attach(&bytes, 0).unwrap();
            assert_eq!(lowtide_detach(start), Status::Ok);
            assert_eq!(described(&fake.live()), before, "{line}");
            say(&failures.to_string());
        }
        assert_eq!(lowtide_deallocate(held), Status::Ok);
    }
    let test = "a_call_that_fails_once_leaves_nothing_attached";
    play(&[("export", export), ("fails", fails)], || {
        for kind in KINDS {
            let (exporter, shared) = exporter(test, kind, &[30 * MIB]);
            let mut importer = Other::start(test, "fails", &[]);
            importer.tell(&shared[0].0);
            let mut failed = Vec::new();
            for call in CALLS {
                for nth in 1..=8 {
                    if importer.ask(&format!("{call} {nth}")) == "1" {
                        failed.push(call);
                    }
                }
            }
            failed.dedup();
            // A handle that is not taken back at once goes back with the rest: no step fails by it.
            let made = |call: &&str| match *call {
                "cuIpcOpenMemHandle_v2" | "cuIpcCloseMemHandle" => kind != EXPANDABLE,
                "cuMemRelease" => false,
                call => kind == EXPANDABLE || !call.starts_with("cuMem"),
            };
            let expected: Vec<&str> = CALLS.into_iter().filter(made).collect();
            assert_eq!(failed, expected);
            importer.finish();
            exporter.finish();
        }
    });
}

/// Every call that sharing makes fails once, in the function and in the thread.
#[test]
fn a_call_that_fails_once_keeps_nothing_from_being_shared() {
    fn fails(fake: &Fake) {
        let memory = allocate(30 << 20, 0).unwrap();
        while let Some(line) = told() {
            let (call, nth) = line.split_once(' ').unwrap();
            fake.fail(call, nth.parse().unwrap(), 999);
            let first = share(memory);
            if let Err(status) = first {
                assert_eq!(status, Status::Driver, "{line}");
                assert!(
                    last_error().contains("failed with error 999"),
                    "{}",
                    last_error()
                );
            }
            let (bytes, offset) = first.or_else(|_| share(memory)).unwrap();
            say(&format!("{bytes} {offset}"));
        }
    }
    let test = "a_call_that_fails_once_keeps_nothing_from_being_shared";
    play(&[("fails", fails), ("import", import)], || {
        for (kind, calls) in [
            (
                EXPANDABLE,
                ["cuDeviceGetUuid_v2", "cuMemExportToShareableHandle"],
            ),
            (KINDS[1], ["cuMemGetAddressRange_v2", "cuIpcGetMemHandle"]),
        ] {
            let mut exporter = Other::start(test, "fails", &[kind]);
            let mut importer = importer(test, &[]);
            for (call, nth) in calls
                .map(|call| (call, 1))
                .into_iter()
                .chain([(calls[1], 2)])
            {
                let answer = exporter.ask(&format!("{call} {nth}"));
                let (bytes, _) = answer.split_once(' ').unwrap();
                let attach = format!("attach 0 {bytes}");
                let mut start = importer.ask(&attach);
                if call == "cuMemExportToShareableHandle" {
                    assert!(start.starts_with("Driver process "), "{start}");
                    assert!(start.contains("failed with error 999"), "{start}");
                    assert_eq!(importer.ask("live"), NOTHING);
                    start = importer.ask(&attach);
                }
                assert_eq!(importer.ask(&format!("detach {start}")), "ok");
                assert_eq!(importer.ask("live"), NOTHING);
            }
            importer.finish();
            exporter.finish();
        }
    });
}
