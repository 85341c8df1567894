//! One device's memory, shared between threads.
//!
//! A [`SharedAllocator`] is a device whose [lanes](Lane) are each behind a lock of their own. A stream is served by one
//! lane always, and free memory is never shared between streams, so a request goes where it would have gone with one
//! lane, and threads that work on different streams do not meet. What is decided, the core decides.
//!
//! ```text
//! SharedAllocator::allocate              lib.rs
//! ├─ lane_of                             streams.rs: which lane serves the stream; no lock
//! │  └─ visit_other_lanes                where routes are set, or blocks wait in other lanes
//! ├─ Lane::request, take                 a free block, under the lane's lock; a hit ends here
//! └─ allocate_new                        growth.rs: a miss, under the common lock and the lane's
//!    └─ Device::serve_miss               enters the other lanes where it needs them: entered.rs
//! SharedAllocator::with_block            lib.rs
//! ├─ OwnerTable::find                    owners.rs: which device and lane hold an address; no lock
//! └─ Lane::free                          under the lane's lock
//! ```
//!
//! Locks are taken in this order: the common one, lanes, driver. A thread without the common lock takes
//! one lane's at most, so that the thread that has it may take others in any order.
//!
//! What is more than one stream's is done under all locks ([`SharedAllocator::with_all`]). Private pools are in the
//! first lane, which is the default stream's, too. A strategy that
//! does not keep streams apart has that lane only ([`Config::keeps_streams_apart`]); such is BFC, which
//! asks for a wait besides: a request that finds no memory is tried again, for a bounded time, whenever
//! another thread has given some back.
//!
//! It is a crate of its own because the core has neither threads nor a clock: there a request is
//! served or it fails, which is what a replay and a simulation need. Whoever has threads (the C ABI)
//! uses this.
#![forbid(unsafe_code)]

mod driver;
mod entered;
mod growth;
mod lane;
mod lane_lock;
mod owners;
mod streams;
mod sync;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lowtide_core::{
    AllocError, Bytes, CheckLevel, Config, DeviceAddress, DeviceState, Driver, EventClock, Lane,
    Stream,
};

pub use driver::SharedDriver;
pub use entered::Entered;
use lane::{LaneGuard, LaneState, POISONED, PoisonOnPanic, ROUTED, SharedLane};
use lane_lock::{LaneLock, LockGuard};
pub use owners::{Holder, Owner, OwnerTable};
use streams::StreamTable;
use sync::atomic::{AtomicU8, AtomicU64, Ordering};
use sync::{Condvar, Mutex};

/// Streams beyond these share lanes. More than there are cores in most machines, and as many as PyTorch
/// keeps in each of its pools of streams.
const LANES_MAX: usize = 32;

/// A device's memory, which threads share.
///
/// Once a thread has panicked inside, every call returns [`AllocError::Poisoned`]: the allocator may
/// have been in the middle of a change, and what it would hand out could be in use already.
#[derive(Debug)]
pub struct SharedAllocator<D> {
    /// What a request must look at before it goes to its lane, most often nothing: a bit for each lane in
    /// which freed blocks wait for other streams, [`ROUTED`] and [`POISONED`].
    flags: AtomicU64,
    streams: StreamTable,
    lanes: Box<[SharedLane<D>]>,
    /// How many lanes streams have been given to: the first ones.
    lanes_in_use: AtomicU8,
    /// What the lanes have in common, behind a lock that is taken before any lane's.
    state: Mutex<DeviceState>,
    /// How long a request that finds no memory is tried again.
    retry_wait: Option<Duration>,
    driver: Arc<Mutex<D>>,
    freed: Freed,
    owners: Arc<OwnerTable>,
    device: u8,
    /// Runs once memory may run out soon.
    clock: Arc<EventClock>,
}

/// Where threads wait for memory, in a device of one lane.
#[derive(Debug)]
struct Freed {
    /// Taken by those who wait before they leave the lane, so that they do not miss what comes free then.
    order: Mutex<()>,
    /// Notified when memory may have come free and someone waits for it.
    condition: Condvar,
}

impl<D: Driver> SharedAllocator<D> {
    /// Returns an allocator that holds nothing yet. `device` is the number that messages name, and by
    /// which `owners`, a table for all devices of the process, knows it.
    pub fn new(
        driver: D,
        device: u8,
        config: &Config,
        owners: Arc<OwnerTable>,
    ) -> SharedAllocator<D> {
        let driver = Arc::new(Mutex::new(driver));
        let count = if config.keeps_streams_apart() {
            LANES_MAX
        } else {
            1
        };
        let clock = Arc::new(EventClock::default());
        let lane = |lane| {
            let owner = Owner { device, lane };
            let driver = SharedDriver::new(Arc::clone(&driver), owner, Arc::clone(&owners));
            let mut allocator = Lane::new(driver, device.into(), config);
            allocator.keep_recent_events(Arc::clone(&clock));
            SharedLane(LaneLock::new(LaneState {
                lane: allocator,
                visits: 0,
                waiting: 0,
                is_alert: false,
            }))
        };
        SharedAllocator {
            flags: AtomicU64::new(0),
            streams: StreamTable::new(),
            lanes: (0..).take(count).map(lane).collect(),
            lanes_in_use: AtomicU8::new(1),
            state: Mutex::new(DeviceState::new(config)),
            retry_wait: config.retry_wait_ms().map(Duration::from_millis),
            driver,
            freed: Freed {
                order: Mutex::new(()),
                condition: Condvar::new(),
            },
            owners,
            device,
            clock,
        }
    }

    /// Returns the address of a block, as [`DeviceAllocator::allocate`](lowtide_core::DeviceAllocator::allocate) does.
    ///
    /// A request that no free block serves calls `on_miss`, without a lock, before anything else is tried: it may use
    /// the allocator, and returns whether it freed something. Where the strategy asks for it, a request that finds no
    /// memory waits for other threads to give some back, at most as long as [`Config::retry_wait_ms`] says; a program of
    /// one thread waits in vain.
    ///
    /// A hit takes one lock, which is that of the stream's lane.
    ///
    /// # Errors
    ///
    /// As [`DeviceAllocator::allocate`](lowtide_core::DeviceAllocator::allocate), what `on_miss` says, and
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
        let lane = &mut guard.state.lane;
        let request = match lane.request(requested, stream) {
            Ok(request) => request,
            Err(error) => {
                self.leave(guard)?;
                return Err(error);
            }
        };
        match lane.take(&request) {
            Some(address) => {
                self.leave(guard)?;
                Ok(address)
            }
            None => {
                let visits = guard.state.visits;
                self.leave(guard)?;
                let has_freed = on_miss()?;
                let searched = (!has_freed).then_some((request, visits));
                self.allocate_new(index, requested, stream, searched)
            }
        }
    }

    /// Returns what [`Lane::allocate_where`] does. Takes one lock, which is that of the stream's
    /// lane.
    ///
    /// # Errors
    ///
    /// As [`Lane::allocate_where`], and [`AllocError::Poisoned`].
    pub fn allocate_where(
        &self,
        address: DeviceAddress,
        requested: Bytes,
        stream: Stream,
    ) -> Result<DeviceAddress, AllocError> {
        let index = self.lane_of(stream)?;
        let mut guard = self.enter(index)?;
        let lane = &mut guard.state.lane;
        let result = lane.allocate_where(address, requested, stream);
        self.leave(guard)?;
        result
    }

    /// Takes a block back as [`Lane::free`] does, and wakes the threads that wait for memory. Takes one lock, which is
    /// that of the block's lane.
    ///
    /// # Errors
    ///
    /// As [`Lane::free`], and [`AllocError::Poisoned`].
    pub fn free(&self, address: DeviceAddress) -> Result<(), AllocError> {
        self.with_block(address, |lane| lane.free(address))
    }

    /// Returns what `act` does with the lane that holds a block, and with others that do not, which
    /// answer with [`AllocError::NotAllocated`].
    ///
    /// # Errors
    ///
    /// What `act` says, [`AllocError::NotAllocated`] where no lane can hold it, and
    /// [`AllocError::Poisoned`].
    pub fn with_block<R>(
        &self,
        address: DeviceAddress,
        act: impl FnMut(&mut Lane<SharedDriver<D>>) -> Result<R, AllocError>,
    ) -> Result<R, AllocError> {
        match self.owners.find(address) {
            Holder::One(owner) if owner.device == self.device => self.with_lane(owner.lane, act),
            Holder::Any => self.with_any_lane(address, act),
            Holder::One(_) | Holder::Nobody => {
                self.refuse_poisoned(self.flags.load(Ordering::Relaxed))?;
                Err(AllocError::NotAllocated { address })
            }
        }
    }

    /// Returns what `act` does with the lane that [`OwnerTable::find`] named.
    ///
    /// # Errors
    ///
    /// What `act` says, and [`AllocError::Poisoned`].
    #[expect(
        clippy::inline_always,
        reason = "a call costs a request a fortieth of its time"
    )]
    #[inline(always)]
    pub fn with_lane<R>(
        &self,
        lane: u8,
        act: impl FnOnce(&mut Lane<SharedDriver<D>>) -> Result<R, AllocError>,
    ) -> Result<R, AllocError> {
        let mut guard = self.enter(lane.into())?;
        let result = act(&mut guard.state.lane);
        let someone_waits = guard.state.waiting > 0;
        self.leave(guard)?;
        if someone_waits {
            self.notify_freed()?;
        }
        result
    }

    /// Returns what `act` does with the first lane that does not answer with
    /// [`AllocError::NotAllocated`]: for an address that any could hold.
    ///
    /// # Errors
    ///
    /// As [`SharedAllocator::with_block`].
    #[cold]
    pub fn with_any_lane<R>(
        &self,
        address: DeviceAddress,
        mut act: impl FnMut(&mut Lane<SharedDriver<D>>) -> Result<R, AllocError>,
    ) -> Result<R, AllocError> {
        for lane in 0..self.lanes_in_use.load(Ordering::Relaxed) {
            match self.with_lane(lane, &mut act) {
                Err(AllocError::NotAllocated { .. }) => {}
                outcome => return outcome,
            }
        }
        Err(AllocError::NotAllocated { address })
    }

    /// Returns what `act` does with the lane that private pools are in. Any of its calls that concern
    /// pools and routes may be made, but [`Lane::empty_pool`]: that needs [`SharedAllocator::with_all`], as who gets the
    /// same memory next tells of that later.
    ///
    /// # Errors
    ///
    /// [`AllocError::Poisoned`]; `act` is then not called.
    pub fn with_pools<R>(
        &self,
        act: impl FnOnce(&mut Lane<SharedDriver<D>>) -> R,
    ) -> Result<R, AllocError> {
        self.with_lane(0, |lane| {
            let result = act(lane);
            // Whoever sees it afterwards asks the lane, whose lock we have.
            if lane.has_routes() {
                self.flags.fetch_or(ROUTED, Ordering::Release);
            } else {
                self.flags.fetch_and(!ROUTED, Ordering::Release);
            }
            Ok(result)
        })
    }

    /// Does something to every lane, those that no stream was given to included, one after the other. Returns the first
    /// error; it is done to the others all the same.
    ///
    /// # Errors
    ///
    /// What `act` says, and [`AllocError::Poisoned`].
    pub fn for_each_lane(
        &self,
        mut act: impl FnMut(&mut Lane<SharedDriver<D>>) -> Result<(), AllocError>,
    ) -> Result<(), AllocError> {
        let lanes = (0..).zip(&self.lanes);
        let results = lanes.map(|(lane, _)| self.with_lane(lane, &mut act));
        results.fold(Ok(()), Result::and)
    }

    /// Returns what `act` does with the driver while no lane can use it.
    pub fn with_driver<R>(&self, act: impl FnOnce(&mut D) -> R) -> R {
        act(&mut SharedDriver::lock_driver(&self.driver))
    }

    /// Checks each lane as [`Lane::check_invariants`] does.
    ///
    /// # Errors
    ///
    /// A sentence that says what is wrong, and in which lane.
    pub fn check_invariants(&self, level: CheckLevel) -> Result<(), String> {
        for index in 0..self.lanes.len() {
            let guard = self.enter(index).map_err(|error| error.to_string())?;
            let checked = guard.state.lane.check_invariants(level);
            checked.map_err(|error| format!("lane {index}: {error}"))?;
        }
        Ok(())
    }

    /// Returns the lane that serves a request of a stream now.
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
        // What waits in the lane itself is looked at there.
        if flags & !(1 << index) == 0 {
            Ok(index)
        } else {
            self.visit_other_lanes(flags, index, stream)
        }
    }

    /// Does what a request must do before it goes to a lane, and returns which that is.
    #[cold]
    fn visit_other_lanes(
        &self,
        flags: u64,
        index: usize,
        stream: Stream,
    ) -> Result<usize, AllocError> {
        self.refuse_poisoned(flags)?;
        let is_routed =
            flags & ROUTED != 0 && self.with_lane(0, |lane| Ok(lane.is_routed(stream)))?;
        let index = if is_routed { 0 } else { index };
        // As with one allocator, a request makes those blocks free that other streams are done with,
        // wherever they are. A lane that another thread is in does that itself.
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
        // After the lock was taken: a thread that panicked inside said so before it gave it back.
        self.refuse_poisoned(self.flags.load(Ordering::Relaxed))?;
        Ok(self.guard(index, state))
    }

    /// Enters a lane unless another thread is in it.
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

    /// Ends a visit, after which what it did is everybody's.
    #[inline]
    fn leave(&self, guard: LaneGuard<'_, D>) -> Result<(), AllocError> {
        let news = guard.state.lane.news();
        let has_news = news.has_new_peak || news.has_waiting_blocks != guard.state.is_alert;
        if has_news || news.is_observed {
            return self.leave_with_news(guard);
        }
        guard.end();
        Ok(())
    }

    /// Tells others what a visit has changed that they must know, but for new peaks of the device: whether
    /// there may be any is the answer.
    fn notify(&self, guard: &mut LaneGuard<'_, D>) -> bool {
        let state = &mut *guard.state;
        let has_waiting_blocks = state.lane.news().has_waiting_blocks;
        if has_waiting_blocks != state.is_alert {
            state.is_alert = has_waiting_blocks;
            // Nobody else changes this bit: the lane is locked.
            self.flags.fetch_xor(1 << guard.index, Ordering::Release);
        }
        state.lane.settle(self.count_in_use() == 1);
        state.lane.news().has_new_peak
    }

    /// Wakes those who wait for memory; the caller is in no lane.
    #[cold]
    fn notify_freed(&self) -> Result<(), AllocError> {
        let _order = { self.freed.order.lock() }.map_err(|_| AllocError::Poisoned)?;
        // All of them: what came free may be too little for the first and enough for the second.
        self.freed.condition.notify_all();
        Ok(())
    }

    fn count_in_use(&self) -> usize {
        self.lanes_in_use.load(Ordering::Relaxed).into()
    }
}

#[cfg(test)]
mod tests;
