//! An allocator that is its device's only lane: each request in one call.
#![expect(
    clippy::inline_always,
    reason = "a call costs a request a fortieth of its time"
)]

use super::Lanes;
use crate::allocator::{DeviceAllocator, Growth};
use crate::driver::Driver;
use crate::error::AllocError;
use crate::snapshot::SegmentSnapshot;
use crate::strategy::Request;
use crate::units::{Bytes, DeviceAddress, MempoolId, Stream};

impl<D: Driver> DeviceAllocator<D> {
    /// Returns the address of a block of at least `requested` bytes that work in `stream` may use at
    /// once; [`DeviceAddress::NULL`] for zero bytes.
    ///
    /// Constant time on a hit for every strategy but BFC with a safe frontier; on a miss, driver
    /// calls.
    ///
    /// # Errors
    ///
    /// [`AllocError::OutOfMemory`] when nothing more can be given back, [`AllocError::TooLarge`]
    /// above [`Bytes::REQUEST_MAX`], [`AllocError::Paused`] where a pool serves the request whose memory
    /// is away, [`AllocError::TooManyStreams`] for one stream more than 65,536 with memory,
    /// [`AllocError::Driver`] when the device fails otherwise.
    #[inline]
    pub fn allocate(
        &mut self,
        requested: Bytes,
        stream: Stream,
    ) -> Result<DeviceAddress, AllocError> {
        if requested.is_zero() {
            return Ok(DeviceAddress::NULL);
        }
        let request = self.request(requested, stream)?;
        self.serve(&request)
    }

    /// Returns the address of a block from the pool called `pool`, whatever routes are set: how a
    /// recording, which knows the pool of each block, is replayed. A pool that does not exist is made;
    /// one that nothing holds is held once from then on, even where memory runs out. A request for zero
    /// bytes, or one that is refused before memory is looked for, leaves the pools as they were.
    ///
    /// # Errors
    ///
    /// As [`DeviceAllocator::allocate`].
    pub fn allocate_in(
        &mut self,
        pool: MempoolId,
        requested: Bytes,
        stream: Stream,
    ) -> Result<DeviceAddress, AllocError> {
        if requested.is_zero() {
            return Ok(DeviceAddress::NULL);
        }
        // Otherwise the pool could end while its own request waits for memory.
        let (index, held_before) = self.hold_pool(pool);
        match self.prepare(index, requested, stream) {
            Ok(request) => self.serve(&request),
            Err(error) => {
                self.undo_hold(index, held_before);
                Err(error)
            }
        }
    }

    /// Returns what serves a request, if anything does.
    #[inline(always)]
    fn serve(&mut self, request: &Request) -> Result<DeviceAddress, AllocError> {
        match self.take(request) {
            Some(address) => Ok(address),
            None => self.allocate_new(request),
        }
    }

    /// Returns what serves a request that no free block of its own domain does, each attempt in order. Apart from
    /// [`DeviceAllocator::serve`], so that a hit does not pay for it.
    #[cold]
    fn allocate_new(&mut self, request: &Request) -> Result<DeviceAddress, AllocError> {
        let found = match self.grow(request)? {
            Growth::Served(address) => Some(address),
            Growth::Rejected => None,
            Growth::Exhausted => Lanes::alone(self).grow_after_release(0, request)?,
        };
        match found {
            Some(address) => Ok(address),
            None => Err(Lanes::alone(self).out_of_memory(0, request)?),
        }
    }

    /// Gives everything that is not in use back to the driver, after the events that freed blocks
    /// wait for, unless a capture forbids the wait. Private pools that are still held keep theirs.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] when the driver refuses a call; what went back before that is gone.
    pub fn empty_cache(&mut self) -> Result<(), AllocError> {
        Lanes::alone(self).empty_cache()
    }

    /// Returns what [`DeviceAllocator::segments`] does, and writes a [`Action::Snapshot`](crate::Action::Snapshot) down.
    pub fn snapshot(&mut self) -> Vec<SegmentSnapshot> {
        Lanes::alone(self).snapshot()
    }
}
