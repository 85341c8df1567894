//! Who is told what happens: an observer of every event, and whoever can free memory when some is short.

use lowtide_core::{Driver, Observer};

use crate::{SharedAllocator, SharedError, Shortage};

impl<D: Driver> SharedAllocator<D> {
    /// Tells `observer` of every event from now on, and nobody if there is none. An earlier one is not
    /// called any more when this returns.
    ///
    /// It is called by the thread whose call caused the event, before that call returns, and of memory that
    /// leaves before it does ([`DeviceAllocator::observe_events`]); under the lock of the lane that it
    /// happened in, so for different streams possibly by several threads at once. It must not use the
    /// allocator.
    ///
    /// [`DeviceAllocator::observe_events`]: lowtide_core::DeviceAllocator::observe_events
    ///
    /// # Errors
    ///
    /// [`SharedError::Poisoned`].
    pub fn observe_events(&self, observer: Option<Observer>) -> Result<(), SharedError> {
        let _common = self.common.lock()?;
        for index in 0..self.lanes.len() {
            // Nothing is left to be told from before: whoever was in a lane has told it.
            let mut visit = self.enter(index)?;
            visit.state.allocator.observe_events(observer.clone());
            visit.end();
        }
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
