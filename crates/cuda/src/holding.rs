//! How the driver fills a range that is held, and gives it back step by step.

use lowtide_core::{Bytes, Driver, DriverError, Handle};

use crate::driver::CudaDriver;
use crate::held::HeldRange;

impl CudaDriver {
    /// Reserves the addresses of a range that has none.
    pub(crate) fn reserve_held(
        &mut self,
        held: &mut HeldRange,
        size: Bytes,
    ) -> Result<(), DriverError> {
        let address = self.reserve(size)?;
        held.reserved = Some((address, size));
        Ok(())
    }

    /// Maps a handle behind what is mapped in a reserved range. Whatever comes of it, the handle is the
    /// range's from now on.
    pub(crate) fn map_held(
        &mut self,
        held: &mut HeldRange,
        handle: Handle,
        size: Bytes,
    ) -> Result<(), DriverError> {
        held.handles.push(handle);
        let start = held.address().expect("the range is reserved first");
        let end = start + held.mapped;
        self.map_handle(end, size, handle)?;
        self.mappings.insert(end, size, None);
        held.mapped += size;
        // What is mapped needs no handle. One that is not taken back now goes back with the rest.
        if self.release(handle).is_ok() {
            held.handles.pop();
        }
        Ok(())
    }

    /// Lets the device and its peers use what is mapped.
    pub(crate) fn allow_held(&mut self, held: &HeldRange) -> Result<(), DriverError> {
        match held.reserved {
            Some((start, _)) => self.set_access(start, held.mapped),
            None => Ok(()),
        }
    }

    /// Gives everything back. After an error it can be called again, and goes on where it stopped.
    pub(crate) fn give_back(&mut self, held: &mut HeldRange) -> Result<(), DriverError> {
        if let Some((start, _)) = held.reserved
            && !held.mapped.is_zero()
        {
            self.unmap(start, held.mapped)?;
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

    /// Gives everything back. What the driver refuses to take is offered to it again whenever memory goes
    /// back.
    pub fn abandon(&mut self, mut held: HeldRange) {
        if self.give_back(&mut held).is_err() {
            self.abandoned.push(held);
        }
    }

    /// Offers the driver what it refused to take back.
    #[inline]
    pub(crate) fn retry_abandoned(&mut self) {
        if !self.abandoned.is_empty() {
            // Taken first: giving them back gets here again.
            for held in std::mem::take(&mut self.abandoned) {
                self.abandon(held);
            }
        }
    }
}
