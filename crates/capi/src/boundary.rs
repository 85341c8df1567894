//! The boundary between Rust and C. A panic does not cross it, and an error becomes a status and the thread's
//! error text. In a forked child nothing is done.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, OsStr, c_char};
use std::fmt::Display;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, OutOfMemory, Status};
use crate::fork;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
    static LAST_OUT_OF_MEMORY: Cell<Option<OutOfMemory>> = const { Cell::new(None) };
}

/// Returns why this thread's last failed call failed; the empty text if none has failed. Never null.
///
/// A call that succeeds does not change the text. The text is UTF-8 and belongs to lowtide. It is valid until the
/// next call in this thread that fails, or until the thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_last_error() -> *const c_char {
    let text = LAST_ERROR.try_with(|last| last.borrow().as_ptr());
    // The text of a thread that is ending is dropped already.
    text.unwrap_or(c"".as_ptr())
}

/// Returns the figures of this thread's last call that ran out of memory.
pub(crate) fn last_out_of_memory() -> Option<OutOfMemory> {
    LAST_OUT_OF_MEMORY.try_with(Cell::get).ok().flatten()
}

/// Runs the body of an exported function. In a forked child the call fails and the body does not run.
#[inline]
pub(crate) fn run(body: impl FnOnce() -> Result<(), Error>) -> Status {
    // A panic leaves no inconsistent state that is used again: everything that a body changes is behind locks,
    // which are then poisoned. Errors are kept inside, because an error that leaves `catch_unwind` is copied twice.
    let status = catch_unwind(AssertUnwindSafe(|| {
        if fork::is_forked() {
            return keep(fork::error());
        }
        body().map_or_else(keep, |()| Status::Ok)
    }));
    status.unwrap_or_else(|panic| {
        keep(Error::new(
            Status::Internal,
            format_args!("lowtide panicked: {}", message_of(&*panic)),
        ))
    })
}

/// Runs the body of an exported function whose caller ignores the reason of a failure. The first line of the
/// error is also printed to standard error; otherwise the user would see only the consequences.
#[inline]
pub(crate) fn run_and_report(body: impl FnOnce() -> Result<(), Error>) -> Status {
    let status = run(body);
    if status != Status::Ok && !is_reported(status) {
        report();
    }
    status
}

/// Returns whether the failure was reported already. In a forked child every call fails, so each process reports
/// that once.
#[cold]
fn is_reported(status: Status) -> bool {
    // The process that has reported it. Its forked children have not.
    static REPORTED_BY: AtomicU32 = AtomicU32::new(0);
    let is_reported_by = |process| REPORTED_BY.swap(process, Ordering::Relaxed) == process;
    status == Status::Forked && is_reported_by(std::process::id())
}

#[cold]
fn report() {
    let line = LAST_ERROR.try_with(|last| {
        let text = last.borrow();
        let text = String::from_utf8_lossy(text.to_bytes());
        text.lines().next().unwrap_or_default().to_owned()
    });
    let _ = line.map(say);
}

/// Writes a line to standard error, with lowtide's name in front.
pub(crate) fn say(line: impl Display) {
    // If standard error cannot be written to, the failure cannot be reported either.
    let _ = io::stderr().write_all(format!("lowtide: {line}\n").as_bytes());
}

/// Keeps an error's text for the thread and returns its status.
#[cold]
fn keep(error: Error) -> Status {
    let Error {
        status,
        mut text,
        out_of_memory,
    } = error;
    if let Some(figures) = out_of_memory {
        // Fails only in a thread that is ending, as below.
        let _ = LAST_OUT_OF_MEMORY.try_with(|last| last.set(Some(*figures)));
    }
    text.retain(|character| character != '\0');
    // Cannot fail: the zero bytes are removed. If no memory is left for a text, the process aborts earlier.
    let text = CString::new(text).unwrap_or_default();
    // A thread that is ending no longer has a place for the text.
    let _ = LAST_ERROR.try_with(|last| last.replace(text));
    status
}

fn message_of(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message")
}

/// The statuses of a function's failures that were reported, one bit each.
pub(crate) struct Reported(AtomicU32);

impl Reported {
    pub(crate) const fn nothing() -> Reported {
        Reported(AtomicU32::new(0))
    }
}

/// Returns the status of a hook's call, and reports the first failure of each status as [`run_and_report`] does.
/// The hook's caller ignores the status, and a loop that always fails must not fill the screen.
#[inline]
pub(crate) fn report_once(reported: &'static Reported, status: Status) -> Status {
    if status != Status::Ok {
        let bit = 1 << status as u32;
        if reported.0.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            report();
        }
    }
    status
}

/// Returns a text that the caller passed; `None` for null.
///
/// # Safety
///
/// `text` is null, or ends with a zero byte and does not change while the returned reference lives.
///
/// # Errors
///
/// If the text is not UTF-8.
pub(crate) unsafe fn text_from_c<'a>(
    name: &str,
    text: *const c_char,
) -> Result<Option<&'a str>, Error> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: 1. it is not null. 2. It ends with a zero byte and does not change, by the contract of
    // this function.
    let text = unsafe { CStr::from_ptr(text) };
    let text = text.to_str().map_err(|_| {
        Error::new(
            Status::InvalidArgument,
            format_args!("`{name}` is not UTF-8"),
        )
    })?;
    Ok(Some(text))
}

/// Returns a path that the caller passed, UTF-8 or not; `None` for null.
///
/// # Safety
///
/// See [`text_from_c`].
pub(crate) unsafe fn path_from_c<'a>(path: *const c_char) -> Option<&'a Path> {
    if path.is_null() {
        return None;
    }
    // SAFETY: 1. it is not null. 2. It ends with a zero byte and does not change, by the contract of
    // this function.
    let path = unsafe { CStr::from_ptr(path) };
    Some(Path::new(OsStr::from_bytes(path.to_bytes())))
}

/// Writes through a pointer that the caller passed.
///
/// # Safety
///
/// `target` is null, or `T` may be written to it.
///
/// # Errors
///
/// If `target` is null.
#[inline]
pub(crate) unsafe fn write_to_c<T>(name: &str, target: *mut T, value: T) -> Result<(), Error> {
    if target.is_null() {
        return Err(Error::null(name));
    }
    // SAFETY: it is not null, so `T` may be written to it, by the contract of this function.
    unsafe { target.write(value) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last_error() -> String {
        // SAFETY: the text is this thread's, in which no call is under way.
        let text = unsafe { CStr::from_ptr(lowtide_last_error()) };
        text.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_a_status() {
        assert_eq!(run(|| panic!("a {} bug", "deep")), Status::Internal);
        assert_eq!(last_error(), "lowtide panicked: a deep bug");
        assert_eq!(run(|| panic!("plain")), Status::Internal);
        assert_eq!(last_error(), "lowtide panicked: plain");
        assert_eq!(run(|| std::panic::panic_any(7)), Status::Internal);
        assert_eq!(last_error(), "lowtide panicked: no message");
    }

    #[test]
    fn the_text_is_the_threads_and_survives_success() {
        let fail = || run(|| Err(Error::new(Status::Config, "no\0 such")));
        assert_eq!(fail(), Status::Config);
        assert_eq!(last_error(), "no such", "a zero byte would cut it off");
        assert_eq!(run(|| Ok(())), Status::Ok);
        assert_eq!(last_error(), "no such");
        let elsewhere = std::thread::spawn(last_error).join().unwrap();
        assert_eq!(elsewhere, "");
    }

    #[test]
    fn texts_from_c() {
        // SAFETY: null is allowed.
        assert_eq!(unsafe { text_from_c("a", std::ptr::null()) }, Ok(None));
        // SAFETY: the text ends with a zero byte and is constant.
        assert_eq!(unsafe { text_from_c("a", c"x".as_ptr()) }, Ok(Some("x")));
        // SAFETY: as above.
        let refused = unsafe { text_from_c("a", c"\xff".as_ptr()) };
        assert_eq!(refused.unwrap_err().text, "`a` is not UTF-8");
    }
}
