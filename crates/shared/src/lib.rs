//! One device's memory, shared between threads.
//!
//! A [`SharedAllocator`] is a device whose [lanes](Lane) each have their own lock. Outside private pools, a stream is
//! always served by the same lane. Streams never share free memory. So a request gets the memory that it would get with
//! a single lane, and threads that work on different streams do not block each other. The core makes every decision
//! about memory.
//!
//! ```text
//! SharedAllocator::allocate              lib.rs
//! ├─ lane_of                             streams.rs: which lane serves the stream; no lock
//! │  └─ visit_other_lanes                if routes are set, or blocks wait in other lanes
//! ├─ Lane::allocate                      a free block, under the lane's lock; a hit ends here
//! └─ allocate_new                        growth.rs: a miss, under the common lock and the lane's
//!    └─ Device::serve_miss               enters the other lanes where it needs them: entered.rs
//! SharedAllocator::with_block            lib.rs
//! ├─ OwnerTable::find                    owners.rs: which device and lane hold an address; no lock
//! └─ Lane::free                          under the lane's lock
//! ```
//!
//! Lock order: the common lock, lanes, the physical memory. A thread without the common lock holds one lane at most. So
//! the thread that holds the common lock may take lanes in any order.
//!
//! Operations on more than one stream's memory run under all locks ([`SharedAllocator::with_all`]). Private pools are
//! in the first lane, which also serves the default stream. A strategy that does not keep streams apart
//! ([`Config::keeps_streams_apart`]) has only that lane. BFC is such a strategy. It also asks for a wait: a request that
//! finds no memory is tried again, for a limited time, whenever another thread has freed some.
//!
//! This is a crate of its own because the core has neither threads nor a clock. In the core a request succeeds or
//! fails at once, as a replay and a simulation need. Callers with threads (the C ABI) use this crate.
#![forbid(unsafe_code)]

mod entered;
mod growth;
mod lane;
mod lane_lock;
mod memory;
mod owners;
mod streams;
mod sync;

use std::ops::DerefMut;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lowtide_core::{
    AllocError, Bytes, Config, DeviceAddress, DeviceState, Driver, EventClock, Found, Lane,
    Observer, Physical, SearchHint, Stream,
};

pub use entered::Entered;
use lane::{LaneGuard, LaneState, POISONED, PoisonOnPanic, ROUTED, SharedLane};
use lane_lock::{LaneLock, LockGuard};
use memory::DeviceOwners;
pub use memory::SharedMemory;
pub use owners::{FoundLane, LaneId, OwnerTable};
use streams::StreamTable;
use sync::atomic::{AtomicU8, AtomicU64, Ordering};
use sync::{Condvar, Mutex};

/// Number of lanes; streams beyond these share lanes. It is more than the number of cores in most machines, and
/// equals the number of streams in each of PyTorch's stream pools.
const LANES_MAX: usize = 32;

/// A device's memory, shared by threads.
///
/// After a thread has panicked inside the allocator, every call returns [`AllocError::Poisoned`]. The panic may
/// have interrupted a change, so a block that the allocator returned could be in use already.
#[derive(Debug)]
pub struct SharedAllocator<D> {
    /// Flags that a request checks before it locks its lane; usually zero. There is a bit for each lane in which
    /// freed blocks wait for other streams, [`ROUTED`] and [`POISONED`].
    flags: AtomicU64,
    streams: StreamTable,
    lanes: Box<[SharedLane<D>]>,
    /// The number of lanes that serve streams: the first ones.
    lanes_in_use: AtomicU8,
    /// The lanes' common state. Its lock is taken before any lane's.
    state: Mutex<DeviceState>,
    /// How long a request that finds no memory is retried.
    retry_wait: Option<Duration>,
    /// Its lock is the last in the lock order.
    physical: Arc<Mutex<Physical<D>>>,
    freed: Freed,
    owners: Arc<OwnerTable>,
    device: u8,
}

/// The lane that [`SharedAllocator::with_lane`] passes to `act`.
#[derive(Clone, Copy, Debug)]
pub enum LaneOf {
    /// The lane of this number, which [`OwnerTable::find`] returned.
    Number(u8),
    /// The lane that serves this stream's requests now.
    Stream(Stream),
    /// The lane that has the private pools: for every call that concerns pools and routes.
    Pools,
}

/// Where threads wait for memory, on a device with one lane.
#[derive(Debug)]
struct Freed {
    /// A thread that is about to wait takes this before it leaves the lane, so that it misses no free in between.
    order: Mutex<()>,
    /// Notified when memory may have become free and a thread waits for it.
    condition: Condvar,
}

impl<D: Driver> SharedAllocator<D> {
    /// Returns an allocator that holds no memory. `device` is the number in messages and in `owners`, the table for
    /// all devices of the process. The first lane publishes in `hint` where its search for a block begins.
    pub fn new(
        driver: D,
        device: u8,
        config: &Config,
        owners: Arc<OwnerTable>,
        hint: Option<&'static SearchHint>,
    ) -> SharedAllocator<D> {
        let recorded = DeviceOwners {
            table: Arc::clone(&owners),
            device,
        };
        let physical = Physical::new(driver, Some(Box::new(recorded)));
        let physical = Arc::new(Mutex::new(physical));
        let count = if config.keeps_streams_apart() {
            LANES_MAX
        } else {
            1
        };
        let clock = Arc::new(EventClock::default());
        let lane = |lane| {
            let memory = SharedMemory(Arc::clone(&physical));
            let hint = hint.filter(|_| lane == 0);
            let mut allocator = Lane::new(memory, lane, device.into(), config, hint);
            allocator.event_log().keep_recent(Arc::clone(&clock));
            SharedLane(LaneLock::new(LaneState {
                lane: allocator,
                visits: 0,
                waiting: 0,
                is_flagged: false,
            }))
        };
        SharedAllocator {
            flags: AtomicU64::new(0),
            streams: StreamTable::new(),
            lanes: (0..).take(count).map(lane).collect(),
            lanes_in_use: AtomicU8::new(1),
            state: Mutex::new(DeviceState::new(config, Some(clock))),
            retry_wait: config.retry_wait_ms().map(Duration::from_millis),
            physical,
            freed: Freed {
                order: Mutex::new(()),
                condition: Condvar::new(),
            },
            owners,
            device,
        }
    }

    /// Returns the address of a block, like [`DeviceAllocator::allocate`](lowtide_core::DeviceAllocator::allocate).
    ///
    /// If no free block serves the request, `on_miss` is called first, without a lock. It may use the allocator,
    /// and returns whether it freed memory.
    ///
    /// If the strategy asks for it, a request that finds no memory waits for other threads to free some, for at most
    /// [`Config::retry_wait_ms`]. With one thread the wait always times out.
    ///
    /// A hit takes one lock: the stream's lane.
    ///
    /// # Errors
    ///
    /// As [`DeviceAllocator::allocate`](lowtide_core::DeviceAllocator::allocate), any error of `on_miss`, and
    /// [`AllocError::Poisoned`].
    #[expect(
        clippy::inline_always,
        reason = "a call costs a request a fortieth of its time"
    )]
    #[inline(always)]
    pub fn allocate(
        &self,
        requested: Bytes,
        stream: Stream,
        on_miss: impl FnOnce() -> Result<bool, AllocError>,
    ) -> Result<DeviceAddress, AllocError> {
        if requested.is_zero() {
            return Ok(DeviceAddress::NULL);
        }
        let index = self.lane_of(stream)?;
        let mut guard = self.enter(index)?;
        match guard.state.lane.allocate(requested, stream) {
            Ok(Found::Block(address)) => {
                self.leave(guard)?;
                Ok(address)
            }
            Err(error) => {
                self.leave(guard)?;
                Err(error)
            }
            Ok(Found::Nothing(request)) => {
                let visits = guard.state.visits;
                self.leave(guard)?;
                let has_freed = on_miss()?;
                let searched = (!has_freed).then_some((request, visits));
                self.allocate_new(index, requested, stream, searched)
            }
        }
    }

    /// Calls `act` with the lane that holds a block, for example to free the block ([`Lane::free`]). Returns its
    /// result, and wakes the threads that wait for memory. Takes one lock, the lane's.
    ///
    /// `act` may also be called with lanes that do not hold the block, for which it must return
    /// [`AllocError::NotAllocated`].
    ///
    /// # Errors
    ///
    /// Any error of `act`, [`AllocError::NotAllocated`] if no lane can hold the block, and
    /// [`AllocError::Poisoned`].
    pub fn with_block<R>(
        &self,
        address: DeviceAddress,
        act: impl FnMut(&mut Lane<SharedMemory<D>>) -> Result<R, AllocError>,
    ) -> Result<R, AllocError> {
        match self.owners.find(address) {
            FoundLane::One(owner) if owner.device == self.device => {
                self.with_lane(LaneOf::Number(owner.lane), act)
            }
            FoundLane::Any => self.with_any_lane(address, act),
            FoundLane::One(_) | FoundLane::Nobody => {
                self.refuse_poisoned(self.flags.load(Ordering::Relaxed))?;
                Err(AllocError::NotAllocated { address })
            }
        }
    }

    /// Calls `act` with one lane, returns its result, and wakes the threads that wait for memory. Takes one lock, the
    /// lane's.
    ///
    /// # Errors
    ///
    /// Any error of `act`, and [`AllocError::Poisoned`].
    #[expect(
        clippy::inline_always,
        reason = "a call costs a request a fortieth of its time"
    )]
    #[inline(always)]
    pub fn with_lane<R>(
        &self,
        which: LaneOf,
        act: impl FnOnce(&mut Lane<SharedMemory<D>>) -> Result<R, AllocError>,
    ) -> Result<R, AllocError> {
        let index = match which {
            LaneOf::Number(lane) => lane.into(),
            LaneOf::Stream(stream) => self.lane_of(stream)?,
            LaneOf::Pools => 0,
        };
        let mut guard = self.enter(index)?;
        let result = act(&mut guard.state.lane);
        if let LaneOf::Pools = which {
            self.publish_routes(&guard);
        }
        let someone_waits = guard.state.waiting > 0;
        self.leave(guard)?;
        if someone_waits {
            self.wake_waiting()?;
        }
        result
    }

    /// Calls `act` with each lane until one does not return [`AllocError::NotAllocated`]. Returns that result. For an
    /// address that any lane may hold.
    ///
    /// # Errors
    ///
    /// As [`SharedAllocator::with_block`].
    #[cold]
    fn with_any_lane<R>(
        &self,
        address: DeviceAddress,
        mut act: impl FnMut(&mut Lane<SharedMemory<D>>) -> Result<R, AllocError>,
    ) -> Result<R, AllocError> {
        for lane in 0..self.lanes_in_use.load(Ordering::Relaxed) {
            match self.with_lane(LaneOf::Number(lane), &mut act) {
                Err(AllocError::NotAllocated { .. }) => {}
                outcome => return outcome,
            }
        }
        Err(AllocError::NotAllocated { address })
    }

    /// Calls `act` with every lane, including lanes without streams. Returns the first error, after all lanes were
    /// visited.
    ///
    /// # Errors
    ///
    /// Any error of `act`, and [`AllocError::Poisoned`].
    pub fn for_each_lane(
        &self,
        mut act: impl FnMut(&mut Lane<SharedMemory<D>>) -> Result<(), AllocError>,
    ) -> Result<(), AllocError> {
        let lanes = (0..).zip(&self.lanes);
        let results = lanes.map(|(lane, _)| self.with_lane(LaneOf::Number(lane), &mut act));
        results.fold(Ok(()), Result::and)
    }

    /// Locks the physical memory and returns it. No lane can use it, nor the driver, until the guard is dropped.
    pub fn physical(&self) -> impl DerefMut<Target = Physical<D>> {
        memory::lock(&self.physical)
    }

    /// Sets or removes the observer of all events. No miss runs meanwhile. After the call returns, an earlier observer
    /// is not notified any more.
    ///
    /// The thread whose call caused an event calls the observer, when
    /// [`EventLog::observe`](lowtide_core::EventLog::observe) says, and under the lock of the event's lane. Several
    /// threads may call it at once for different streams. It must not use the allocator.
    ///
    /// # Errors
    ///
    /// [`AllocError::Poisoned`].
    pub fn observe_events(&self, observer: Option<&Observer>) -> Result<(), AllocError> {
        let _state = self.state.lock().map_err(|_| AllocError::Poisoned)?;
        for index in 0..self.lanes.len() {
            // No earlier event is left to report: each thread reports its events before it leaves the lane.
            let mut guard = self.enter(index)?;
            guard.state.lane.event_log().observe(observer.cloned());
            guard.end();
        }
        Ok(())
    }

    /// Returns the lane that serves a stream's request now.
    #[inline]
    fn lane_of(&self, stream: Stream) -> Result<usize, AllocError> {
        let index = if stream == Stream::DEFAULT || self.lanes.len() == 1 {
            0
        } else {
            match self.streams.find(stream) {
                Some(index) => index,
                None => self.give_lane(stream)?,
            }
        };
        let flags = self.flags.load(Ordering::Acquire);
        // Blocks that wait in the lane itself are checked there.
        if flags & !(1 << index) == 0 {
            Ok(index)
        } else {
            self.visit_other_lanes(flags, index, stream)
        }
    }

    /// Does the work that precedes a request, and returns the lane that serves it.
    #[cold]
    fn visit_other_lanes(
        &self,
        flags: u64,
        index: usize,
        stream: Stream,
    ) -> Result<usize, AllocError> {
        self.refuse_poisoned(flags)?;
        let is_routed = flags & ROUTED != 0
            && self.with_lane(LaneOf::Number(0), |lane| Ok(lane.is_routed(stream)))?;
        let index = if is_routed { 0 } else { index };
        // As with a single allocator, a request frees pending blocks in every lane once other streams are done with
        // them. A lane that another thread has locked does that itself.
        let waits = |&other: &usize| other != index && flags >> other & 1 == 1;
        for other in (0..self.lanes.len()).filter(waits) {
            if let Some(mut guard) = self.try_enter(other)? {
                let result = guard.state.lane.process_events();
                self.leave(guard)?;
                result?;
            }
        }
        Ok(index)
    }

    #[inline]
    fn refuse_poisoned(&self, flags: u64) -> Result<(), AllocError> {
        if flags & POISONED == 0 {
            Ok(())
        } else {
            Err(AllocError::Poisoned)
        }
    }

    #[expect(
        clippy::inline_always,
        reason = "a guard in an answer is copied through memory, which every request would wait for"
    )]
    #[inline(always)]
    fn enter(&self, index: usize) -> Result<LaneGuard<'_, D>, AllocError> {
        let state = self.lanes[index].0.lock();
        // After locking: a thread that panicked inside set the flag before it released the lock.
        self.refuse_poisoned(self.flags.load(Ordering::Relaxed))?;
        Ok(self.guard(index, state))
    }

    /// Enters a lane unless another thread has locked it.
    fn try_enter(&self, index: usize) -> Result<Option<LaneGuard<'_, D>>, AllocError> {
        let state = self.lanes[index].0.try_lock();
        self.refuse_poisoned(self.flags.load(Ordering::Relaxed))?;
        Ok(state.map(|state| self.guard(index, state)))
    }

    #[expect(clippy::inline_always, reason = "as `enter`, of which it is a part")]
    #[inline(always)]
    fn guard<'a>(
        &'a self,
        index: usize,
        mut state: LockGuard<'a, LaneState<D>>,
    ) -> LaneGuard<'a, D> {
        state.visits += 1;
        let poison = PoisonOnPanic {
            flags: &self.flags,
            was_panicking: thread::panicking(),
        };
        LaneGuard {
            state,
            poison,
            index,
        }
    }

    /// Ends a visit and publishes what it did.
    #[inline]
    fn leave(&self, guard: LaneGuard<'_, D>) -> Result<(), AllocError> {
        let news = guard.state.lane.news();
        let has_news = news.has_new_peak || news.has_waiting_blocks != guard.state.is_flagged;
        if has_news || news.is_observed {
            return self.leave_with_news(guard);
        }
        guard.end();
        Ok(())
    }

    /// Publishes the changes of a visit that other threads must know, except new peaks of the device. Returns
    /// whether there may be new peaks.
    fn publish(&self, guard: &mut LaneGuard<'_, D>) -> bool {
        let state = &mut *guard.state;
        let has_waiting_blocks = state.lane.news().has_waiting_blocks;
        if has_waiting_blocks != state.is_flagged {
            state.is_flagged = has_waiting_blocks;
            // No other thread changes this bit: the lane is locked.
            self.flags.fetch_xor(1 << guard.index, Ordering::Release);
        }
        state.lane.notify_and_clear_peak(self.count_in_use() == 1);
        state.lane.news().has_new_peak
    }

    /// Publishes whether private pools serve some streams. `pools` is the lane that has the pools.
    fn publish_routes(&self, pools: &LaneGuard<'_, D>) {
        // A thread that reads the flag afterwards asks the lane, which is locked here.
        if pools.state.lane.news().has_routes {
            self.flags.fetch_or(ROUTED, Ordering::Release);
        } else {
            self.flags.fetch_and(!ROUTED, Ordering::Release);
        }
    }

    /// Wakes all threads that wait for memory. The caller holds no lane.
    #[cold]
    fn wake_waiting(&self) -> Result<(), AllocError> {
        let _order = { self.freed.order.lock() }.map_err(|_| AllocError::Poisoned)?;
        // All of them: the free memory may be too little for the first thread and enough for the second.
        self.freed.condition.notify_all();
        Ok(())
    }

    fn count_in_use(&self) -> usize {
        self.lanes_in_use.load(Ordering::Relaxed).into()
    }
}

#[cfg(test)]
mod tests;
