//! What lowtide's own threads share: how they accept connections, and files that a forked child does not keep.

use std::ffi::c_int;
use std::io::{self, ErrorKind};
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

/// The descriptors of files that only this process keeps; negative if unused.
static FILES: [AtomicI32; 8] = [const { AtomicI32::new(-1) }; 8];

/// A file that a forked child does not keep. If the child kept a socket, connections would wait for a thread that
/// the child does not have, even after this process ends. The child must not drop it, because its descriptor may
/// belong to another file there.
pub(crate) struct ParentsOnly<F> {
    file: F,
    place: &'static AtomicI32,
}

impl<F: AsRawFd> ParentsOnly<F> {
    /// # Errors
    ///
    /// If the system refuses to register the handler, or there are more such files than lowtide has.
    pub(crate) fn new(file: F) -> io::Result<ParentsOnly<F>> {
        watch_forks()?;
        let number = file.as_raw_fd();
        let mut places = FILES.iter();
        let place = places.find(|place| {
            let taken = place.compare_exchange(-1, number, Ordering::Relaxed, Ordering::Relaxed);
            taken.is_ok()
        });
        let place = place.ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(ParentsOnly { file, place })
    }
}

impl<F> Deref for ParentsOnly<F> {
    type Target = F;

    fn deref(&self) -> &F {
        &self.file
    }
}

impl<F> Drop for ParentsOnly<F> {
    fn drop(&mut self) {
        // Before the descriptor can be reused for another file.
        self.place.store(-1, Ordering::Relaxed);
    }
}

/// Calls `answer` for each connection that `accept` returns, and never returns.
pub(crate) fn accept_all<S>(accept: impl Fn() -> io::Result<S>, answer: impl Fn(S)) {
    loop {
        match accept() {
            Ok(stream) => answer(stream),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // For example, the process has too many open files.
            Err(_) => thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn watch_forks() -> io::Result<()> {
    static OUTCOME: OnceLock<c_int> = OnceLock::new();
    extern "C" fn in_child() {
        for file in &FILES {
            let number = file.swap(-1, Ordering::Relaxed);
            if number >= 0 {
                // SAFETY: the number is the file's, and its owner, the thread, is not in this process.
                unsafe { libc::close(number) };
            }
        }
    }
    let code = *OUTCOME.get_or_init(|| {
        // SAFETY: what runs in the child closes files, which is allowed there.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) }
    });
    match code {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}
