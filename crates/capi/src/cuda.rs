//! NVIDIA's driver in this process, started at its first use.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use lowtide_core::{AllocError, DriverError};
use lowtide_cuda::{Library, PrimaryContexts};

use crate::error::Error;
use crate::fork;

/// The driver, once it is started.
static LIBRARY: Mutex<Option<Arc<Library>>> = Mutex::new(None);

/// The primary contexts that this process's threads work in.
static CONTEXTS: OnceLock<PrimaryContexts> = OnceLock::new();

/// Returns the driver, and starts it if necessary.
///
/// # Errors
///
/// If there is no working driver.
pub(crate) fn library() -> Result<Arc<Library>, Error> {
    let mut library = lock()?;
    let started = match library.take() {
        Some(started) => started,
        None => {
            fork::watch()?;
            Library::load()?
        }
    };
    Ok(Arc::clone(library.insert(started)))
}

/// Returns the driver if it is started.
pub(crate) fn started() -> Result<Option<Arc<Library>>, Error> {
    Ok(lock()?.clone())
}

fn lock() -> Result<MutexGuard<'static, Option<Arc<Library>>>, Error> {
    let library = LIBRARY.lock();
    library.map_err(|_| Error::stopped("when the driver was started"))
}

/// Returns the primary contexts that this process's threads work in. Starts the driver.
///
/// # Errors
///
/// If there is no working driver, or the driver fails.
#[inline]
pub(crate) fn contexts() -> Result<&'static PrimaryContexts, Error> {
    match CONTEXTS.get() {
        Some(contexts) => Ok(contexts),
        None => find_contexts(),
    }
}

#[cold]
fn find_contexts() -> Result<&'static PrimaryContexts, Error> {
    let contexts = PrimaryContexts::new(library()?)?;
    Ok(CONTEXTS.get_or_init(|| contexts))
}

/// Returns whether the error says that the driver has shut down. It does so before the process ends, and has
/// freed all memory then.
pub(crate) fn is_gone(error: &AllocError) -> bool {
    const DEINITIALIZED: i32 = 4;
    matches!(
        error,
        AllocError::Driver(DriverError::Failed {
            code: DEINITIALIZED,
            ..
        })
    )
}
