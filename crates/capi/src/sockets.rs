//! This process's sockets, by which other processes of the same user find it.

use std::env;
use std::io;
use std::os::unix::net::UnixListener;
use std::sync::{Mutex, Once};

use lowtide_sockets::{Directory, Entry, Places};

use crate::threads::ParentsOnly;

/// Socket names that are removed when the process ends.
static ENTRIES: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

/// Returns the socket directories of this process's user.
pub(crate) fn places() -> Places {
    Places::new(env::var_os("XDG_RUNTIME_DIR"))
}

/// Returns a socket that listens under a name. A forked child does not keep the socket. The name is removed when
/// the process ends.
///
/// # Errors
///
/// If the system cannot create the socket.
pub(crate) fn listen(directory: Directory, name: &str) -> io::Result<ParentsOnly<UnixListener>> {
    let (listener, entry) = directory.listen(name)?;
    remove_at_exit(entry);
    ParentsOnly::new(listener)
}

fn remove_at_exit(entry: Entry) {
    static IS_WATCHED: Once = Once::new();
    extern "C" fn at_exit() {
        // In a forked child the lock may be held for ever, and the names belong to the parent.
        if let Ok(entries) = ENTRIES.try_lock() {
            entries.iter().for_each(Entry::remove);
        }
    }
    // As above. The next `lowtide top` removes a name that stays.
    if let Ok(mut entries) = ENTRIES.try_lock() {
        entries.push(entry);
    }
    IS_WATCHED.call_once(|| {
        // SAFETY: the function stays: what has a thread is not unloaded.
        let _ = unsafe { libc::atexit(at_exit) };
    });
}
