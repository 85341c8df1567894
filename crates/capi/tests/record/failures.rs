//! The recorder when a system call fails.

use std::ffi::{c_int, c_void};
use std::fs;
use std::mem;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use lowtide::*;

use crate::common::{CACHING, Fake, isolated, last_error};
use crate::{Program, check_records, directory, play, read, reported, role, start};

#[test]
fn a_file_that_cannot_be_written_to_ends_the_recording_and_not_the_job() {
    let test = "failures::a_file_that_cannot_be_written_to_ends_the_recording_and_not_the_job";
    isolated(test, &[], |fake| {
        assert_eq!(start(Path::new("/no/such/directory/x")), Status::File);
        assert!(
            last_error().starts_with("nothing is recorded: /no/such/directory/x: No such file")
        );
        let full = directory().join("ends.lowtide");
        assert_eq!(start(&full), Status::Ok);
        DISK_IS_FULL.store(true, Ordering::Relaxed);
        let mut program = Program::new(fake, 3, 0, 2);
        // More events than the queue holds.
        program.run(100_000);
        assert_eq!(lowtide_record_stop(), Status::File);
        DISK_IS_FULL.store(false, Ordering::Relaxed);
        let text = last_error();
        let expected = format!("the recording to {} ended: No space left", full.display());
        assert!(text.starts_with(&expected), "{text}");
        let path = directory().join("after.lowtide");
        assert_eq!(start(&path), Status::Ok, "another can be made");
        program.run(100);
        assert_eq!(lowtide_record_stop(), Status::Ok);
        assert!(!read(&path).is_cut_off);
    });
}

/// Whether lowtide can start no thread.
static HAS_NO_THREADS: AtomicBool = AtomicBool::new(false);

type PthreadCreate = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    extern "C" fn(*mut c_void) -> *mut c_void,
    *mut c_void,
) -> c_int;

/// Replaces the C library's function in this program.
///
/// # Safety
///
/// As for the C library's function.
#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> c_int {
    // Threads of the stand-in driver start in another shared object.
    let is_of_this_program =
        object(start as *const c_void) == object(pthread_create as *const c_void);
    if is_of_this_program && HAS_NO_THREADS.load(Ordering::Relaxed) {
        return libc::EAGAIN;
    }
    // SAFETY: the name ends with a zero byte.
    let next = unsafe { libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr()) };
    assert!(!next.is_null(), "the C library has it");
    // SAFETY: it is the function of this type.
    let next: PthreadCreate = unsafe { mem::transmute(next) };
    // SAFETY: by the contract of this function.
    unsafe { next(thread, attributes, start, argument) }
}

/// Returns the address of the shared object that contains a function.
fn object(function: *const c_void) -> *mut c_void {
    let mut info = mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: it may be written to.
    assert_ne!(unsafe { libc::dladdr(function, info.as_mut_ptr()) }, 0);
    // SAFETY: all zeros are a valid value, and so is what was written.
    unsafe { info.assume_init() }.dli_fbase
}

/// Whether writes to files fail because the disk is full.
static DISK_IS_FULL: AtomicBool = AtomicBool::new(false);

/// Replaces the C library's function in this program.
///
/// # Safety
///
/// As for the C library's function.
#[unsafe(no_mangle)]
unsafe extern "C" fn write(file: c_int, bytes: *const c_void, length: usize) -> isize {
    let mut status = mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: it may be written to.
    let is_known = unsafe { libc::fstat(file, status.as_mut_ptr()) } == 0;
    // SAFETY: all zeros are a valid value, and so is what was written.
    let mode = unsafe { status.assume_init() }.st_mode;
    let is_on_disk = is_known && mode & libc::S_IFMT == libc::S_IFREG;
    if is_on_disk && DISK_IS_FULL.load(Ordering::Relaxed) {
        // SAFETY: takes nothing.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: the location belongs to this thread.
        unsafe { *errno = libc::ENOSPC };
        return -1;
    }
    // SAFETY: by the contract of this function.
    let written = unsafe { libc::syscall(libc::SYS_write, file, bytes, length) };
    isize::try_from(written).unwrap_or(-1)
}

const NO_THREAD: &str = "Resource temporarily unavailable (os error 11)";

#[test]
fn a_recording_without_a_thread_does_not_begin() {
    let test = "failures::a_recording_without_a_thread_does_not_begin";
    isolated(test, &[CACHING], |fake| {
        let mut program = Program::new(fake, 5, 0, 2);
        program.run(500);
        let path = directory().join("threadless.lowtide");
        for _ in 0..2 {
            HAS_NO_THREADS.store(true, Ordering::Relaxed);
            assert_eq!(start(&path), Status::File);
            let expected = format!("nothing is recorded: {}: {NO_THREAD}", path.display());
            assert_eq!(last_error(), expected);
            assert!(!path.exists(), "no file that is no recording");
            program.run(500);
            assert_eq!(lowtide_record_stop(), Status::Ok, "there is none to stop");
            HAS_NO_THREADS.store(false, Ordering::Relaxed);
            check_records(&mut program, &path);
        }
    });
}

#[test]
fn a_disk_that_is_full_at_once_ends_the_recording() {
    let test = "failures::a_disk_that_is_full_at_once_ends_the_recording";
    isolated(test, &[CACHING], |fake| {
        let mut program = Program::new(fake, 6, 0, 2);
        program.run(500);
        let path = directory().join("full.lowtide");
        for steps in [0, 100_000] {
            DISK_IS_FULL.store(true, Ordering::Relaxed);
            assert_eq!(start(&path), Status::Ok, "the file is there");
            program.run(steps);
            assert_eq!(lowtide_record_stop(), Status::File);
            let text = last_error();
            let expected = format!(
                "the recording to {} ended: No space left on device",
                path.display()
            );
            assert!(text.starts_with(&expected), "{text}");
            assert_eq!(fs::metadata(&path).unwrap().len(), 0);
            DISK_IS_FULL.store(false, Ordering::Relaxed);
            check_records(&mut program, &path);
        }
    });
}

/// If the recording that the environment asks for fails, one line says so, and the program continues.
#[test]
fn a_recording_that_the_environment_asks_for_may_fail() {
    const TEST: &str = "failures::a_recording_that_the_environment_asks_for_may_fail";
    if let Some(role) = role() {
        let fake = Fake::load();
        HAS_NO_THREADS.store(role == "thread", Ordering::Relaxed);
        DISK_IS_FULL.store(role == "disk", Ordering::Relaxed);
        let mut program = Program::new(&fake, 14, 0, 2);
        program.run(1_000);
        assert_eq!(lowtide_record_stop() == Status::File, role == "disk");
        HAS_NO_THREADS.store(false, Ordering::Relaxed);
        DISK_IS_FULL.store(false, Ordering::Relaxed);
        check_records(&mut program, &directory().join("later.lowtide"));
        std::process::exit(0);
    }
    let directory = directory().join("of_environment");
    fs::create_dir_all(&directory).unwrap();
    let path = directory.join("job.lowtide");
    let shown = path.display();
    let cases = [
        (
            "thread",
            format!("lowtide: nothing is recorded: {shown}: {NO_THREAD}"),
        ),
        (
            "disk",
            format!(
                "lowtide: the recording to {shown} ended: No space left on device (os error 28); what came before is there"
            ),
        ),
        (
            "file",
            format!(
                "lowtide: nothing is recorded: {shown}: No such file or directory (os error 2)"
            ),
        ),
    ];
    for (role, expected) in cases {
        let _ = fs::remove_file(&path);
        if role == "file" {
            fs::remove_dir_all(&directory).unwrap();
        }
        let output = play(TEST, role, &path, &[]);
        assert!(output.status.success(), "{role}: {output:?}");
        assert_eq!(reported(&output), [expected], "{role}");
    }
}
