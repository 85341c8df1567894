//! Who is told what happens: an observer of every event, and whoever can free memory when some is short.

use std::sync::Arc;

use lowtide_core::{Driver, Event};

use crate::{SharedAllocator, SharedError};

/// Called for each event, by the thread whose call caused it, under the lock of the lane that it happened
/// in: for different streams possibly by several threads at once.
pub type Observer = Arc<dyn Fn(&Event) + Send + Sync>;

/// Called without any lock when no free block serves a request and before the driver is asked; returns
/// whether it freed something.
pub type Shortage = Arc<dyn Fn() -> bool + Send + Sync>;

impl<D: Driver> SharedAllocator<D> {
    /// Tells `observer` of every event from now on, and nobody if there is none. An earlier one is not
    /// called any more when this returns.
    ///
    /// It must not use the allocator.
    ///
    /// # Errors
    ///
    /// [`SharedError::Poisoned`].
    pub fn observe_events(&self, observer: Option<Observer>) -> Result<(), SharedError> {
        let mut common = self.common.lock()?;
        for index in 0..self.lanes.len() {
            // Nothing is left to be told from before: whoever was in a lane has told it.
            let mut visit = self.enter(index)?;
            let state = &mut *visit.state;
            state.allocator.record_events(observer.is_some());
            state.observer.clone_from(&observer);
            visit.end();
        }
        common.observer = observer;
        Ok(())
    }

    /// Calls `shortage` from now on when no free block serves a request, and nobody if there is none. It
    /// may use the allocator. An earlier one may still be at work in another thread when this returns.
    ///
    /// # Errors
    ///
    /// [`SharedError::Poisoned`].
    pub fn on_shortage(&self, shortage: Option<Shortage>) -> Result<(), SharedError> {
        self.common.lock()?.shortage = shortage;
        Ok(())
    }

    /// Asks whoever can free memory to do so, and returns whether they did.
    pub(crate) fn relieve_shortage(&self) -> Result<bool, SharedError> {
        let shortage = self.common.lock()?.shortage.clone();
        Ok(shortage.is_some_and(|shortage| shortage()))
    }
}
