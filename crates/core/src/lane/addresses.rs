//! Requests at a given address.

use super::{Lane, Request};
use crate::block::{Block, BlockId, BlockState};
use crate::error::AllocError;
use crate::physical::Memory;
use crate::strategy::{Placement, PyTorchPlacement};
use crate::units::{Bytes, DeviceAddress, Stream};

impl<M: Memory> Lane<M> {
    /// Allocates `size` bytes, rounded up to 512, at the start of the free block at `address`. Replays use it. Linear
    /// in the blocks.
    ///
    /// # Errors
    ///
    /// - [`AllocError::NotFree`] if no free block of that size begins there, and for zero bytes. Also for any strategy
    ///   except `caching`: the others have block sizes of their own.
    /// - [`AllocError::TooLarge`] above [`Bytes::REQUEST_MAX`].
    pub fn allocate_at(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
    ) -> Result<DeviceAddress, AllocError> {
        if size > Bytes::REQUEST_MAX {
            return Err(AllocError::TooLarge { requested: size });
        }
        // A free block may be in no list. Requests like this are rare enough to look at every block.
        let is_it = |block: &Block| block.address == address && block.state == BlockState::Free;
        let found = { self.heap.blocks.iter() }.find(|(_, block)| is_it(block) && !size.is_zero());
        let found = found.map(|(id, _)| id).zip(self.strategy.as_pytorch_mut());
        let (id, strategy) = found.ok_or(AllocError::NotFree { address, size })?;
        if !strategy.take_at(&mut self.heap, id, size.round_up(Bytes(512))) {
            return Err(AllocError::NotFree { address, size });
        }
        Ok(self.hand_out(id, size))
    }

    /// Allocates `requested` bytes at `address`, if they are free for a request of `stream`. Returns `address`, or
    /// [`DeviceAddress::NULL`] for zero bytes. The bytes before and after them in their free block stay free.
    ///
    /// With `caching`, this serves all that PyTorch's `_resize_with_addr_` does, with the same statistics: the bytes
    /// before are allocated and freed again. Strategies with fixed block addresses serve a request only at an address
    /// that they could choose. Gets no memory from the driver. Linear in the free blocks of the stream and in the pages
    /// of the bytes.
    ///
    /// # Errors
    ///
    /// As [`Lane::allocate`], and [`AllocError::NotFree`] if the bytes:
    /// - are in use, or belong to another stream or pool;
    /// - serve requests of other sizes;
    /// - or, with `tide`, have no memory, or the free bytes before them have none.
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
        // The bytes behind the first block are free, and begin at the address.
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
