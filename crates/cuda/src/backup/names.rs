//! Names of backups' files, by which who looks finds them. A name keeps the file on disk: it goes with the backup, or
//! when the process ends.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use lowtide_files::remove;

use crate::signals::SignalsBlocked;

/// All names that there are; `None` once the process ends, when files get no more.
static NAMES: Mutex<Option<BTreeSet<PathBuf>>> = Mutex::new(Some(BTreeSet::new()));
/// The process whose names they are: the child of a fork has none.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// The names of one file, which are removed with this.
#[derive(Debug, Default)]
pub(super) struct Names(Vec<PathBuf>);

impl Names {
    /// Has `link` give the file a name. One that the file system refuses is left out: names are for who looks.
    pub(super) fn add(&mut self, path: PathBuf, link: impl FnOnce(&Path) -> io::Result<()>) {
        remove_at_exit();
        // Whose handler ends the process would wait for this lock in this thread.
        let _signals = SignalsBlocked::begin();
        let mut names = lock();
        let Some(names) = names.as_mut() else {
            return;
        };
        // One that a process of this number left when it was killed.
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
        // As above.
        let _signals = SignalsBlocked::begin();
        let mut names = lock();
        for path in &self.0 {
            // Somebody else may have removed it, or its directory.
            let _ = remove(path);
            if let Some(names) = names.as_mut() {
                names.remove(path);
            }
        }
    }
}

/// Has all names removed when the process ends.
fn remove_at_exit() {
    extern "C" fn at_exit() {
        // Before the lock, which another thread may have held when this process was forked.
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
        // SAFETY: the function is ours, and the library that it is part of is never unloaded (`capi/build.rs`).
        let registered = unsafe { libc::atexit(at_exit) };
        // It takes at least 32 functions; with one more than it takes the names are left.
        let _ = registered;
    });
}

fn is_own_process() -> bool {
    PROCESS.load(Ordering::SeqCst) == std::process::id()
}

fn lock() -> MutexGuard<'static, Option<BTreeSet<PathBuf>>> {
    // Each change under the lock is one step.
    NAMES.lock().unwrap_or_else(PoisonError::into_inner)
}
