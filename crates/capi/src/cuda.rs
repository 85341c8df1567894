//! NVIDIA's driver in this process: started when it is first needed.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use lowtide_core::{AllocError, DriverError};
use lowtide_cuda::{Library, PrimaryContexts};

use crate::error::Error;
use crate::fork;

/// The driver, once it was started.
static LIBRARY: Mutex<Option<Arc<Library>>> = Mutex::new(None);

/// Where the process's threads work.
static CONTEXTS: OnceLock<PrimaryContexts> = OnceLock::new();

/// Returns the driver, which is started if it has not been.
///
/// # Errors
///
/// If there is no driver that works.
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

/// Returns the driver, if it was started.
pub(crate) fn started() -> Result<Option<Arc<Library>>, Error> {
    Ok(lock()?.clone())
}

fn lock() -> Result<MutexGuard<'static, Option<Arc<Library>>>, Error> {
    let library = LIBRARY.lock();
    library.map_err(|_| Error::stopped("when the driver was started"))
}

/// Returns where the process's threads work. Starts the driver.
///
/// # Errors
///
/// If there is no driver that works, or it fails.
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

/// Returns whether the driver says that it has ended, as it does before the process: it has taken all memory back then.
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
