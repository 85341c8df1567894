//! Who is told what happens: an observer of every event, and whoever can free memory when some is short.

use std::fmt;
use std::sync::Arc;

use lowtide_core::{Bytes, DeviceAddress, Driver, Event, Stream};

use crate::sync::MutexGuard;
use crate::{LockedAllocator, LockedError, State};

/// Called for each event, under the lock, by the thread whose call caused it.
pub type Observer = Arc<dyn Fn(&Event) + Send + Sync>;

/// Called without the lock when no free block serves a request and before the driver is asked; returns
/// whether it freed something.
pub type Shortage = Arc<dyn Fn() -> bool + Send + Sync>;

/// Who wants to be told. Never without either.
#[derive(Clone, Default)]
pub(crate) struct Listeners {
    observer: Option<Observer>,
    shortage: Option<Shortage>,
}

impl fmt::Debug for Listeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listeners")
            .field("has_observer", &self.observer.is_some())
            .field("has_shortage", &self.shortage.is_some())
            .finish()
    }
}

impl<D: Driver> LockedAllocator<D> {
    /// Tells `observer` of every event from now on, and nobody if there is none. An earlier one is not
    /// called any more when this returns.
    ///
    /// It must not use the allocator.
    ///
    /// # Errors
    ///
    /// [`LockedError::Poisoned`].
    pub fn observe_events(&self, observer: Option<Observer>) -> Result<(), LockedError> {
        let mut state = self.lock()?;
        state.allocator.record_events(observer.is_some());
        state.listen(|listeners| listeners.observer = observer);
        Ok(())
    }

    /// Calls `shortage` from now on when no free block serves a request, and nobody if there is none. It
    /// may use the allocator. An earlier one may still be at work in another thread when this returns.
    ///
    /// # Errors
    ///
    /// [`LockedError::Poisoned`].
    pub fn on_shortage(&self, shortage: Option<Shortage>) -> Result<(), LockedError> {
        self.lock()?
            .listen(|listeners| listeners.shortage = shortage);
        Ok(())
    }

    /// Serves a request while someone listens: whoever can free memory is asked to when no free block
    /// serves it, and then all is tried.
    #[inline(never)]
    pub(crate) fn allocate_heard(
        &self,
        mut state: MutexGuard<'_, State<D>>,
        requested: Bytes,
        stream: Stream,
    ) -> Result<DeviceAddress, LockedError> {
        if state.shortage().is_none() {
            return self.allocate_locked(state, requested, stream);
        }
        let served = state.allocator.allocate_cached(requested, stream);
        state.tell_observer();
        if let Some(address) = served? {
            return Ok(address);
        }
        let shortage = state.shortage().cloned();
        drop(state);
        let has_freed = shortage.is_some_and(|shortage| shortage());
        let mut state = self.lock()?;
        // Without news the free blocks are not searched again, unless the request is to wait for some.
        if has_freed || state.allocator.retry_wait_ms().is_some() {
            return self.allocate_locked(state, requested, stream);
        }
        let served = state.allocator.allocate_new(requested, stream);
        state.tell_observer();
        Ok(served?)
    }
}

impl<D: Driver> State<D> {
    /// Hands on what happened since the last time.
    #[inline]
    pub(crate) fn tell_observer(&mut self) {
        if self.listeners.is_some() {
            self.tell_listeners();
        }
    }

    #[cold]
    fn tell_listeners(&mut self) {
        let listeners = self.listeners.as_ref();
        let Some(observer) = listeners.and_then(|listeners| listeners.observer.as_ref()) else {
            return;
        };
        for event in self.allocator.take_events() {
            observer(&event);
        }
    }

    fn shortage(&self) -> Option<&Shortage> {
        self.listeners.as_ref()?.shortage.as_ref()
    }

    fn listen(&mut self, change: impl FnOnce(&mut Listeners)) {
        let mut listeners = self.listeners.take().unwrap_or_default();
        change(&mut listeners);
        let is_heard = listeners.observer.is_some() || listeners.shortage.is_some();
        self.listeners = is_heard.then_some(listeners);
    }
}
