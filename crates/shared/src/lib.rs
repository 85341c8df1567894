//! One device's memory, shared between threads.
//!
//! A [`SharedAllocator`] serves a device by several *lanes*: a [`DeviceAllocator`] each, behind a lock of
//! its own. A stream is served by one lane always, and free memory is never shared between streams, so
//! a request goes where it would have gone with one allocator, and threads that work on different
//! streams do not meet.
//!
//! ```text
//! SharedAllocator::allocate              lib.rs
//! ├─ lane_of                             streams.rs: which lane serves the stream; no lock
//! │  └─ visit_other_lanes                where routes are set, or blocks wait in other lanes
//! ├─ DeviceAllocator::request, take      a free block, under the lane's lock; a hit ends here
//! └─ allocate_new                        growth.rs: a miss, under the device's common lock
//!    ├─ DeviceAllocator::grow            new memory, under the lane's lock too
//!    └─ Lanes::grow_after_release        where there is none: what any lane can give back, under all
//! SharedAllocator::free                  lib.rs
//! ├─ OwnerTable::find                    owners.rs: which device and lane hold an address; no lock
//! └─ DeviceAllocator::free               under the lane's lock
//! ```
//!
//! Locks are taken in this order: the common one, lanes, driver. A thread without the common lock takes
//! one lane's at most, so that the thread that has it may take others in any order.
//!
//! What is more than one stream's is done under all locks (`device.rs`): figures, pictures, limits, giving
//! memory back. Private pools are in the first lane, which is the default stream's, too. A strategy that
//! does not keep streams apart has that lane only ([`Config::keeps_streams_apart`]); such is BFC, which
//! asks for a wait besides: a request that finds no memory is tried again, for a bounded time, whenever
//! another thread has given some back.
//!
//! It is a crate of its own because the core has neither threads nor a clock: there a request is
//! served or it fails, which is what a replay and a simulation need. Whoever has threads (the C ABI)
//! uses this.
#![forbid(unsafe_code)]

mod device;
mod driver;
mod error;
mod growth;
mod lane;
mod lane_lock;
mod listeners;
mod owners;
mod streams;
mod sync;

use std::sync::Arc;
use std::thread;

use lowtide_core::{
    AllocError, Bytes, Config, DeviceAddress, DeviceAllocator, Driver, EventClock, Stream,
};

pub use device::DevicePast;
pub use driver::SharedDriver;
pub use error::SharedError;
pub use lane::Shortage;
use lane::{Common, Lane, LaneGuard, LaneState, POISONED, PoisonOnPanic, ROUTED};
use lane_lock::{LaneLock, LockGuard};
pub use lowtide_core::Observer;
pub use owners::{Holder, Owner, OwnerTable};
use streams::StreamTable;
use sync::atomic::{AtomicU8, AtomicU64, Ordering};
use sync::{Condvar, Mutex};

/// Streams beyond these share lanes. More than there are cores in most machines, and as many as PyTorch
/// keeps in each of its pools of streams.
const LANES_MAX: u8 = 32;

/// A device's memory, which threads share.
///
/// Once a thread has panicked inside, every call returns [`SharedError::Poisoned`]: the allocator may
/// have been in the middle of a change, and what it would hand out could be in use already.
#[derive(Debug)]
pub struct SharedAllocator<D> {
    /// What a request must look at before it goes to its lane, most often nothing: a bit for each lane in
    /// which freed blocks wait for other streams, [`ROUTED`] and [`POISONED`].
    flags: AtomicU64,
    streams: StreamTable,
    lanes: Box<[Lane<D>]>,
    /// How many lanes streams have been given to: the first ones.
    lanes_in_use: AtomicU8,
    common: Mutex<Common>,
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
            let mut allocator = DeviceAllocator::new(driver, device.into(), config);
            // The limit that the configuration asks for is the device's.
            allocator.set_limit(None);
            allocator.keep_recent_events(Arc::clone(&clock));
            Lane {
                state: LaneLock::new(LaneState {
                    allocator,
                    visits: 0,
                    waiting: 0,
                    is_alert: false,
                }),
            }
        };
        SharedAllocator {
            flags: AtomicU64::new(0),
            streams: StreamTable::new(),
            lanes: (0..count).map(lane).collect(),
            lanes_in_use: AtomicU8::new(1),
            common: Mutex::new(Common::new(config)),
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

    /// Returns what [`DeviceAllocator::allocate`] does. Where the strategy asks for it, a request
    /// that finds no memory first waits for other threads to give some back, at most as long as
    /// [`DeviceAllocator::retry_wait_ms`] says; a program of one thread waits in vain.
    ///
    /// A hit takes one lock, which is that of the stream's lane.
    ///
    /// # Errors
    ///
    /// As [`DeviceAllocator::allocate`], and [`SharedError::Poisoned`].
    #[expect(
        clippy::inline_always,
        reason = "a call costs a request a fortieth of its time"
    )]
    #[inline(always)]
    pub fn allocate(&self, requested: Bytes, stream: Stream) -> Result<DeviceAddress, SharedError> {
        self.allocate_prepared(requested, stream, || Ok(()))
    }

    /// As [`SharedAllocator::allocate`]. A request that no free block serves calls `prepare` first, without a
    /// lock; a hit does not call it.
    ///
    /// # Errors
    ///
    /// As [`SharedAllocator::allocate`], and what `prepare` says.
    #[expect(
        clippy::inline_always,
        reason = "a call costs a request a fortieth of its time"
    )]
    #[inline(always)]
    pub fn allocate_prepared(
        &self,
        requested: Bytes,
        stream: Stream,
        prepare: impl FnOnce() -> Result<(), AllocError>,
    ) -> Result<DeviceAddress, SharedError> {
        if requested.is_zero() {
            return Ok(DeviceAddress::NULL);
        }
        let index = self.lane_of(stream)?;
        let mut visit = self.enter(index)?;
        let lane = &mut visit.state.allocator;
        let request = match lane.request(requested, stream) {
            Ok(request) => request,
            Err(error) => {
                self.leave(visit)?;
                return Err(error.into());
            }
        };
        match lane.take(&request) {
            Some(address) => {
                self.leave(visit)?;
                Ok(address)
            }
            None => {
                let visits = visit.state.visits;
                self.leave(visit)?;
                prepare()?;
                self.allocate_new(index, requested, stream, (request, visits))
            }
        }
    }

    /// Returns what [`DeviceAllocator::allocate_where`] does. Takes one lock, which is that of the stream's
    /// lane.
    ///
    /// # Errors
    ///
    /// As [`DeviceAllocator::allocate_where`], and [`SharedError::Poisoned`].
    pub fn allocate_where(
        &self,
        address: DeviceAddress,
        requested: Bytes,
        stream: Stream,
    ) -> Result<DeviceAddress, SharedError> {
        let index = self.lane_of(stream)?;
        let mut visit = self.enter(index)?;
        let lane = &mut visit.state.allocator;
        let result = lane.allocate_where(address, requested, stream);
        self.leave(visit)?;
        Ok(result?)
    }

    /// Takes a block back as [`DeviceAllocator::free`] does, and wakes the threads that wait for
    /// memory. Takes one lock, which is that of the block's lane.
    ///
    /// # Errors
    ///
    /// As [`DeviceAllocator::free`], and [`SharedError::Poisoned`].
    pub fn free(&self, address: DeviceAddress) -> Result<(), SharedError> {
        self.with_block(address, |lane| lane.free(address))
    }

    /// Returns what `act` does with the lane that holds a block, and with others that do not, which
    /// answer with [`AllocError::NotAllocated`].
    ///
    /// # Errors
    ///
    /// What `act` says, [`AllocError::NotAllocated`] where no lane can hold it, and
    /// [`SharedError::Poisoned`].
    pub fn with_block<R>(
        &self,
        address: DeviceAddress,
        act: impl FnMut(&mut DeviceAllocator<SharedDriver<D>>) -> Result<R, AllocError>,
    ) -> Result<R, SharedError> {
        match self.owners.find(address) {
            Holder::One(owner) if owner.device == self.device => self.with_lane(owner.lane, act),
            Holder::Any => self.with_any_lane(address, act),
            Holder::One(_) | Holder::Nobody => {
                self.refuse_poisoned(self.flags.load(Ordering::Relaxed))?;
                Err(AllocError::NotAllocated { address }.into())
            }
        }
    }

    /// Returns what `act` does with the lane that [`OwnerTable::find`] named.
    ///
    /// # Errors
    ///
    /// What `act` says, and [`SharedError::Poisoned`].
    #[expect(
        clippy::inline_always,
        reason = "a call costs a request a fortieth of its time"
    )]
    #[inline(always)]
    pub fn with_lane<R>(
        &self,
        lane: u8,
        act: impl FnOnce(&mut DeviceAllocator<SharedDriver<D>>) -> Result<R, AllocError>,
    ) -> Result<R, SharedError> {
        let mut visit = self.enter(lane.into())?;
        let result = act(&mut visit.state.allocator);
        let someone_waits = visit.state.waiting > 0;
        self.leave(visit)?;
        if someone_waits {
            self.notify_freed()?;
        }
        Ok(result?)
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
        mut act: impl FnMut(&mut DeviceAllocator<SharedDriver<D>>) -> Result<R, AllocError>,
    ) -> Result<R, SharedError> {
        for lane in 0..self.lanes_in_use.load(Ordering::Relaxed) {
            match self.with_lane(lane, &mut act) {
                Err(SharedError::Alloc(AllocError::NotAllocated { .. })) => {}
                outcome => return outcome,
            }
        }
        Err(AllocError::NotAllocated { address }.into())
    }

    /// Returns the lane that serves a request of a stream now.
    #[inline]
    fn lane_of(&self, stream: Stream) -> Result<usize, SharedError> {
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
    ) -> Result<usize, SharedError> {
        self.refuse_poisoned(flags)?;
        let is_routed =
            flags & ROUTED != 0 && self.with_lane(0, |lane| Ok(lane.is_routed(stream)))?;
        let index = if is_routed { 0 } else { index };
        // As with one allocator, a request makes those blocks free that other streams are done with,
        // wherever they are. A lane that another thread is in does that itself.
        let waits = |&other: &usize| other != index && flags >> other & 1 == 1;
        for other in (0..self.lanes.len()).filter(waits) {
            if let Some(mut visit) = self.try_enter(other)? {
                let result = visit.state.allocator.process_events();
                self.leave(visit)?;
                result?;
            }
        }
        Ok(index)
    }

    #[inline]
    fn refuse_poisoned(&self, flags: u64) -> Result<(), SharedError> {
        if flags & POISONED == 0 {
            Ok(())
        } else {
            Err(SharedError::Poisoned)
        }
    }

    #[expect(
        clippy::inline_always,
        reason = "a visit in an answer is copied through memory, which every request would wait for"
    )]
    #[inline(always)]
    fn enter(&self, index: usize) -> Result<LaneGuard<'_, D>, SharedError> {
        let state = self.lanes[index].state.lock();
        // After the lock was taken: a thread that panicked inside said so before it gave it back.
        self.refuse_poisoned(self.flags.load(Ordering::Relaxed))?;
        Ok(self.visit(index, state))
    }

    /// Enters a lane unless another thread is in it.
    fn try_enter(&self, index: usize) -> Result<Option<LaneGuard<'_, D>>, SharedError> {
        let state = self.lanes[index].state.try_lock();
        self.refuse_poisoned(self.flags.load(Ordering::Relaxed))?;
        Ok(state.map(|state| self.visit(index, state)))
    }

    #[expect(clippy::inline_always, reason = "as `enter`, of which it is a part")]
    #[inline(always)]
    fn visit<'a>(
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
    fn leave(&self, visit: LaneGuard<'_, D>) -> Result<(), SharedError> {
        let state = &*visit.state;
        let is_alert = state.allocator.has_waiting_blocks();
        let has_news = state.allocator.has_new_peak() || is_alert != state.is_alert;
        if has_news || state.allocator.is_observed() {
            return self.leave_with_news(visit);
        }
        visit.end();
        Ok(())
    }

    #[cold]
    fn leave_with_news(&self, mut visit: LaneGuard<'_, D>) -> Result<(), SharedError> {
        let has_new_peak = self.notify(&mut visit);
        visit.end();
        if has_new_peak {
            let mut common = self.common.lock()?;
            let mut visits = self.enter_all()?;
            common.lanes(&mut visits).sync_peaks();
        }
        Ok(())
    }

    /// Tells others what a visit has changed that they must know, but for new peaks of the device: whether
    /// there may be any is the answer.
    fn notify(&self, visit: &mut LaneGuard<'_, D>) -> bool {
        let state = &mut *visit.state;
        let is_alert = state.allocator.has_waiting_blocks();
        if is_alert != state.is_alert {
            state.is_alert = is_alert;
            // Nobody else changes this bit: the lane is locked.
            self.flags.fetch_xor(1 << visit.index, Ordering::Release);
        }
        state.allocator.notify_observers();
        if self.count_in_use() == 1 {
            state.allocator.keep_new_peak();
        }
        state.allocator.has_new_peak()
    }

    /// Wakes those who wait for memory; the caller is in no lane.
    #[cold]
    fn notify_freed(&self) -> Result<(), SharedError> {
        let _order = self.freed.order.lock()?;
        // All of them: what came free may be too little for the first and enough for the second.
        self.freed.condition.notify_all();
        Ok(())
    }

    /// Enters all lanes that streams were given to. The caller has the growth lock.
    fn enter_all(&self) -> Result<Vec<LaneGuard<'_, D>>, SharedError> {
        let enter = |index| self.enter(index);
        (0..self.count_in_use()).map(enter).collect()
    }

    fn count_in_use(&self) -> usize {
        self.lanes_in_use.load(Ordering::Relaxed).into()
    }

    /// Gives a stream the lane that serves it from now on.
    #[cold]
    fn give_lane(&self, stream: Stream) -> Result<usize, SharedError> {
        let mut common = self.common.lock()?;
        let index = self.streams.find_or_insert(stream, self.lanes.len());
        if index >= self.count_in_use() {
            let mut visits = self.enter_all()?;
            visits.push(self.enter(index)?);
            // Under the lock of every lane, as whoever is in one may ask whether there are others.
            self.lanes_in_use.fetch_add(1, Ordering::Relaxed);
            common.lanes(&mut visits).sync_all_peaks();
        }
        Ok(index)
    }
}

#[cfg(test)]
mod tests;
