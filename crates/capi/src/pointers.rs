//! Conversions of pointers, streams and sizes between C and the allocator.

use std::ffi::c_void;
use std::ptr;

use lowtide_core::{Bytes, DeviceAddress, Stream};

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
