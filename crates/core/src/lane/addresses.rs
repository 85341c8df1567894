//! Requests that say where their memory is to lie.

use super::{Lane, Request};
use crate::block::{Block, BlockId, BlockState};
use crate::error::AllocError;
use crate::physical::Memory;
use crate::strategy::Placement;
use crate::units::{Bytes, DeviceAddress, Stream};

impl<M: Memory> Lane<M> {
    /// Returns `address`, at which a free block begins, cut to exactly `size` bytes: how a private pool
    /// is restored to a checkpoint, block by block.
    ///
    /// # Errors
    ///
    /// [`AllocError::NotFree`] where no free block begins, where it is smaller, or from a strategy
    /// whose blocks have sizes of their own: all but `caching`.
    pub fn allocate_at(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
    ) -> Result<DeviceAddress, AllocError> {
        if size > Bytes::REQUEST_MAX {
            return Err(AllocError::TooLarge { requested: size });
        }
        // A free block need not be listed; checkpoints are rare enough to look at all.
        let is_it = |block: &Block| block.address == address && block.state == BlockState::Free;
        let found = { self.heap.blocks.iter() }.find(|(_, block)| is_it(block));
        let found = found.map(|(id, _)| id);
        let id = found.ok_or(AllocError::NotFree { address, size })?;
        let rounded = size.round_up(Bytes(512));
        if size.is_zero() || !self.strategy.take_at(&mut self.heap, id, rounded) {
            return Err(AllocError::NotFree { address, size });
        }
        Ok(self.hand_out(id, size))
    }

    /// Returns `address`, from which on at least `requested` bytes were free that a request of `stream`
    /// could have been given, and are now its block; [`DeviceAddress::NULL`] for zero bytes. What lies before
    /// and behind in their free block stays free.
    ///
    /// With `caching` this serves all that PyTorch's `_resize_with_addr_` does, and counts as there: what
    /// lies before is taken for the moment. A strategy whose blocks have places of their own serves a request
    /// that would go there by itself. Never asks the driver for memory. Linear in the free blocks of the
    /// stream and in the pages of the bytes.
    ///
    /// # Errors
    ///
    /// [`AllocError::NotFree`] where those bytes are not free, are another stream's or pool's, or serve
    /// requests of other sizes, or with `tide` have no memory, as what lies before; and as [`Lane::allocate`].
    pub fn allocate_where(
        &mut self,
        address: DeviceAddress,
        requested: Bytes,
        stream: Stream,
    ) -> Result<DeviceAddress, AllocError> {
        if requested.is_zero() {
            return Ok(DeviceAddress::NULL);
        }
        let request = self.request(requested, stream)?;
        let first = self.take_around(&request, address)?;
        let before = self.heap.blocks.get(first);
        if before.address == address {
            return Ok(self.hand_out(first, requested));
        }
        debug_assert!(before.address < address && before.end() == address);
        self.hand_out(first, before.size);
        // What lay behind is free, and begins at the address.
        let block = self.take_around(&request, address)?;
        debug_assert_eq!(self.heap.blocks.get(block).address, address);
        self.hand_out(block, requested);
        self.free_unused(first);
        Ok(address)
    }

    fn take_around(
        &mut self,
        request: &Request,
        address: DeviceAddress,
    ) -> Result<BlockId, AllocError> {
        let found = (self.strategy).take_around(&mut self.heap, request, address);
        let size = request.requested;
        found.ok_or(AllocError::NotFree { address, size })
    }
}
