//! This process's sockets, where other processes of the same user find it.

use std::env;
use std::io;
use std::os::unix::net::UnixListener;
use std::sync::{Mutex, Once};

use lowtide_sockets::{Directory, Entry, Places};

use crate::threads::ParentsOnly;

/// Names that go when the process ends.
static ENTRIES: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

/// Returns the places of this process's user.
pub(crate) fn places() -> Places {
    Places::new(env::var_os("XDG_RUNTIME_DIR"))
}

/// Returns a socket that listens under a name. The child of a fork does not keep it, and the name goes when the process
/// ends.
///
/// # Errors
///
/// If the system has none.
pub(crate) fn listen(directory: Directory, name: &str) -> io::Result<ParentsOnly<UnixListener>> {
    let (listener, entry) = directory.listen(name)?;
    remove_at_exit(entry);
    ParentsOnly::new(listener)
}

fn remove_at_exit(entry: Entry) {
    static IS_WATCHED: Once = Once::new();
    extern "C" fn at_exit() {
        // In the child of a fork the lock may be held for ever, and the names are its parent's.
        if let Ok(entries) = ENTRIES.try_lock() {
            entries.iter().for_each(Entry::remove);
        }
    }
    // As above. A name that stays is removed by the next `lowtide top`.
    if let Ok(mut entries) = ENTRIES.try_lock() {
        entries.push(entry);
    }
    IS_WATCHED.call_once(|| {
        // SAFETY: the function stays: what has a thread is not unloaded.
        let _ = unsafe { libc::atexit(at_exit) };
    });
}
