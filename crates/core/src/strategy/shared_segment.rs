//! Segments for many blocks, as large as the device has room for.

use crate::block::SegmentId;
use crate::domain::DomainId;
use crate::driver::{Driver, DriverError, unless_out_of_memory};
use crate::physical::Memory;
use crate::segment::Heap;
use crate::stats::SizeKind;
use crate::units::Bytes;

/// Segments for many blocks, and for large ones, are multiples of this: the driver gives nothing less.
pub(super) const SEGMENT_ROUNDING: Bytes = Bytes::mib(2);

/// Takes a segment for many blocks, of `most` bytes where that much can be had, but at least `least`;
/// `None` where the driver or the limit refuses even that. It counts as large.
///
/// More than half of what is left is taken only for a request that needs it, because other streams
/// and other libraries of the process use the same device. Each further attempt is for half of the
/// one before.
///
/// # Errors
///
/// What the driver said, unless it is out of memory.
pub(super) fn allocate_shared_segment<M: Memory>(
    heap: &mut Heap,
    memory: &mut M,
    domain: DomainId,
    least: Bytes,
    most: Bytes,
) -> Result<Option<SegmentId>, DriverError> {
    let half = |size: Bytes| {
        Bytes(size.get() / 2)
            .round_down(SEGMENT_ROUNDING)
            .max(least)
    };
    let in_limit = heap
        .limit
        .unwrap_or(Bytes(u64::MAX))
        .saturating_sub(heap.limited());
    let left = memory
        .physical_mut()
        .driver_mut()
        .memory_info()?
        .free
        .min(in_limit);
    debug_assert!(!least.is_zero());
    let mut size = most.max(least);
    while size > least && size > Bytes(left.get() / 2) {
        size = half(size);
    }
    loop {
        let segment = heap.allocate_segment(memory, domain, size, SizeKind::Large);
        match unless_out_of_memory(segment)? {
            None if size > least => size = half(size),
            answer => return Ok(answer),
        }
    }
}
