//! Fills a [`HeldRange`] and releases it step by step.

use lowtide_core::{Bytes, Driver, DriverError, Handle};

use crate::driver::CudaDriver;
use crate::held::HeldRange;

impl CudaDriver {
    /// Reserves addresses for a range that has none.
    pub(crate) fn reserve_held(
        &mut self,
        held: &mut HeldRange,
        size: Bytes,
    ) -> Result<(), DriverError> {
        let address = self.reserve(size)?;
        held.reserved = Some((address, size));
        Ok(())
    }

    /// Maps a handle after the mapped part of a reserved range. The range owns the handle from now on, even after
    /// an error.
    pub(crate) fn map_held(
        &mut self,
        held: &mut HeldRange,
        handle: Handle,
        size: Bytes,
    ) -> Result<(), DriverError> {
        held.handles.push(handle);
        let start = held.address().expect("the range is reserved first");
        let end = start + held.mapped;
        self.map(end, size, handle)?;
        held.mapped += size;
        self.imported.insert(start, held.mapped);
        // The mapping keeps the memory, so the handle can be released. If that fails, it is released with the rest.
        if self.release(handle).is_ok() {
            held.handles.pop();
        }
        Ok(())
    }

    /// Gives the device and its peers access to the mapped part.
    pub(crate) fn allow_held(&mut self, held: &HeldRange) -> Result<(), DriverError> {
        match held.reserved {
            Some((start, _)) => self.set_access(start, held.mapped),
            None => Ok(()),
        }
    }

    /// Releases everything to the driver. After an error, another call continues where this one stopped.
    pub(crate) fn release_held(&mut self, held: &mut HeldRange) -> Result<(), DriverError> {
        if let Some((start, _)) = held.reserved
            && !held.mapped.is_zero()
        {
            self.unmap(start, held.mapped)?;
            self.imported.remove(&start);
            held.mapped = Bytes::ZERO;
        }
        while let Some(&handle) = held.handles.last() {
            self.release(handle)?;
            held.handles.pop();
        }
        if let Some((start, size)) = held.reserved {
            self.unreserve(start, size)?;
            held.reserved = None;
        }
        Ok(())
    }

    /// Releases everything to the driver. If the driver refuses, the release is retried whenever memory is
    /// released.
    pub fn abandon(&mut self, mut held: HeldRange) {
        if self.release_held(&mut held).is_err() {
            self.abandoned.push(held);
        }
    }

    /// Retries the releases that the driver refused.
    #[inline]
    pub(crate) fn retry_abandoned(&mut self) {
        if !self.abandoned.is_empty() {
            // The list is taken first, because a release calls this function again.
            for held in std::mem::take(&mut self.abandoned) {
                self.abandon(held);
            }
        }
    }
}
