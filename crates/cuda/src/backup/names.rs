//! Names of backup files, by which people find them. A named file stays on disk, so a name is removed with its
//! backup or when the process exits.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use lowtide_files::remove;

use crate::exit::call_at_exit;
use crate::signals::SignalsBlocked;

/// All names of this process. `None` once the process is exiting: files get no names then.
static NAMES: Mutex<Option<BTreeSet<PathBuf>>> = Mutex::new(Some(BTreeSet::new()));
/// The process that created the names. A forked child has none.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// The names of one file. They are removed on drop.
#[derive(Debug, Default)]
pub(super) struct Names(Vec<PathBuf>);

impl Names {
    /// Gives the file a name by calling `link`. If the file system refuses, the name is left out: names are only for
    /// people who look.
    pub(super) fn add(&mut self, path: PathBuf, link: impl FnOnce(&Path) -> io::Result<()>) {
        remove_at_exit();
        // A signal handler in this thread that ends the process would deadlock on this lock.
        let _signals = SignalsBlocked::begin();
        let mut names = lock();
        let Some(names) = names.as_mut() else {
            return;
        };
        // A killed process with the same id may have left a file of this name.
        let _ = remove(&path);
        if link(&path).is_ok() {
            names.insert(path.clone());
            self.0.push(path);
        }
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        if self.0.is_empty() || !is_own_process() {
            return;
        }
        // As in `add`.
        let _signals = SignalsBlocked::begin();
        let mut names = lock();
        for path in &self.0 {
            // Someone else may have removed the file or its directory.
            let _ = remove(path);
            if let Some(names) = names.as_mut() {
                names.remove(path);
            }
        }
    }
}

/// Removes all names when the process exits.
fn remove_at_exit() {
    extern "C" fn at_exit() {
        // Checked before locking: another thread may have held the lock when this process was forked.
        if !is_own_process() {
            return;
        }
        let names = lock().take();
        for path in names.iter().flatten() {
            let _ = remove(path);
        }
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        PROCESS.store(std::process::id(), Ordering::SeqCst);
        // If the system has no room for the handler, the names stay.
        call_at_exit(at_exit);
    });
}

fn is_own_process() -> bool {
    PROCESS.load(Ordering::SeqCst) == std::process::id()
}

fn lock() -> MutexGuard<'static, Option<BTreeSet<PathBuf>>> {
    // A panic cannot leave the set half changed: each change under the lock is one step.
    NAMES.lock().unwrap_or_else(PoisonError::into_inner)
}
