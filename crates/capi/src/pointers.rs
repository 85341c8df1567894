//! Conversions of pointers, streams, sizes and pool numbers between C and the allocator.

use std::ffi::c_void;
use std::ptr;

use lowtide_core::{Bytes, DeviceAddress, MempoolId, Stream};

#[inline]
pub(crate) fn address_of(memory: *mut c_void) -> DeviceAddress {
    DeviceAddress(memory.expose_provenance() as u64)
}

#[inline]
pub(crate) fn stream_of(stream: *mut c_void) -> Stream {
    Stream(stream.expose_provenance() as u64)
}

#[inline]
pub(crate) fn pointer_to(address: DeviceAddress) -> *mut c_void {
    ptr::with_exposed_provenance_mut(host_size(Bytes(address.get())))
}

/// Returns a number of bytes as a C `size_t`.
#[inline]
pub(crate) fn host_size(size: Bytes) -> usize {
    const { assert!(size_of::<usize>() == size_of::<u64>(), "hosts have 64 bits") };
    #[expect(clippy::cast_possible_truncation, reason = "checked in the line above")]
    let size = size.get() as usize;
    size
}

/// The number of a memory pool. PyTorch passes it as `std::pair<uint64_t, uint64_t>`, which uses the same
/// registers. Both 0 is the default pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Mempool {
    /// Above 0 for a pool of a graph capture.
    pub capture: u64,
    /// Above 0 for a `torch.cuda.MemPool`.
    pub user: u64,
}

impl Mempool {
    pub(crate) fn id(self) -> MempoolId {
        MempoolId(self.capture, self.user)
    }

    pub(crate) fn of(id: MempoolId) -> Mempool {
        Mempool {
            capture: id.0,
            user: id.1,
        }
    }
}
