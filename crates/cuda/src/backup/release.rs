//! What goes back to the driver: at once or, where the driver refuses, when something else does.

use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lowtide_core::DriverError;

use crate::context::PrimaryContext;

/// A device's context, and what the backups there offered the driver and it refused to take back.
pub(super) struct ReleaseQueue {
    context: Arc<PrimaryContext>,
    refused: Mutex<Vec<Refused>>,
}

/// One thing that the driver refused.
struct Refused {
    /// How much of the host's memory stays with it.
    bytes: usize,
    release: Release,
}

/// Releases one thing in the device's context. After an error it can be called again.
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

    /// Releases something with so much of the host's memory, and all that was refused before.
    pub(super) fn release(
        &self,
        bytes: usize,
        release: impl FnMut(&PrimaryContext) -> Result<(), DriverError> + Send + 'static,
    ) {
        let release = Box::new(release);
        self.lock().push(Refused { bytes, release });
        self.retry();
    }

    /// Offers the driver once more what it refused, each thing twice: most failures pass.
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

    /// Returns how much of the host's memory the driver refused to let go.
    pub(super) fn bytes(&self) -> usize {
        self.lock().iter().map(|refused| refused.bytes).sum()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Refused>> {
        // Each change under the lock is one step.
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
        // What is refused now stays for the rest of the process: the driver uses it.
        self.retry();
    }
}
