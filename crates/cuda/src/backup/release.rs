//! Releases resources to the driver. If the driver refuses, the release is retried when something else is released.

use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lowtide_core::DriverError;

use crate::context::PrimaryContext;

/// A device's context, and the releases that the driver refused to the device's backups.
pub(super) struct ReleaseQueue {
    context: Arc<PrimaryContext>,
    refused: Mutex<Vec<Refused>>,
}

/// A release that the driver refused.
struct Refused {
    /// How many bytes of host memory it keeps.
    bytes: usize,
    release: Release,
}

/// Releases one resource in the device's context. After an error it can be called again.
type Release = Box<dyn FnMut(&PrimaryContext) -> Result<(), DriverError> + Send>;

impl ReleaseQueue {
    pub(super) fn new(context: Arc<PrimaryContext>) -> ReleaseQueue {
        ReleaseQueue {
            context,
            refused: Mutex::default(),
        }
    }

    pub(super) fn context(&self) -> &Arc<PrimaryContext> {
        &self.context
    }

    /// Releases a resource that keeps `bytes` bytes of host memory, and retries all earlier ones that were refused.
    pub(super) fn release(
        &self,
        bytes: usize,
        release: impl FnMut(&PrimaryContext) -> Result<(), DriverError> + Send + 'static,
    ) {
        let release = Box::new(release);
        self.lock().push(Refused { bytes, release });
        self.retry();
    }

    /// Retries the refused releases, each up to twice: most failures are temporary.
    pub(super) fn retry(&self) {
        let mut offered = mem::take(&mut *self.lock());
        if offered.is_empty() {
            return;
        }
        let enter = || self.context.enter_relaxed();
        if let Ok(_scope) = enter().or_else(|_| enter()) {
            offered.retain_mut(|Refused { release, .. }| {
                let outcome = release(&self.context);
                outcome.or_else(|_| release(&self.context)).is_err()
            });
        }
        self.lock().append(&mut offered);
    }

    /// Returns how many bytes of host memory the driver refused to release.
    pub(super) fn bytes(&self) -> usize {
        self.lock().iter().map(|refused| refused.bytes).sum()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Refused>> {
        // A panic cannot leave the list half changed: each change under the lock is one step.
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for ReleaseQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut queue = f.debug_struct("ReleaseQueue");
        queue.field("context", &self.context);
        queue.field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

impl Drop for ReleaseQueue {
    fn drop(&mut self) {
        // What is refused now is kept for the rest of the process, because the driver may use it.
        self.retry();
    }
}
