//! This process's sockets, by which other processes of the same user find it.

use std::env;
use std::io;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use lowtide_cuda::SignalsBlocked;
use lowtide_sockets::{Directory, Places, is_same_user};

use crate::exit::at_exit;
use crate::threads::{ParentsOnly, accept_all};

/// Returns the socket directories of this process's user.
pub(crate) fn places() -> Places {
    Places::new(env::var_os("XDG_RUNTIME_DIR"))
}

/// Calls `answer` from now on for each process of the same user that connects to a socket of this name. Another
/// process that connects, or whose answer fails, sees the connection end. Runs in a thread with its own name.
///
/// A forked child does not keep the socket. The socket's name is removed when the process ends.
///
/// # Errors
///
/// If the system cannot create the socket or the thread.
pub(crate) fn serve(
    directory: Directory,
    name: &str,
    thread_name: &str,
    answer: impl Fn(&UnixStream) -> io::Result<()> + Send + 'static,
) -> io::Result<()> {
    let (listener, entry) = directory.listen(name)?;
    // The next `lowtide top` removes a name that stays.
    at_exit(move || entry.remove());
    let listener = ParentsOnly::new(listener)?;
    let _signals = SignalsBlocked::begin();
    let thread = thread::Builder::new().name(thread_name.to_owned());
    thread.spawn(move || {
        let answer_own_user = |stream: &UnixStream| {
            if is_same_user(stream)? {
                answer(stream)
            } else {
                Ok(())
            }
        };
        let accept = || listener.accept().map(|(stream, _)| stream);
        accept_all(accept, |stream| {
            // Even after a bug in lowtide, the thread serves the next process.
            drop(catch_unwind(AssertUnwindSafe(|| answer_own_user(&stream))));
        });
    })?;
    Ok(())
}
