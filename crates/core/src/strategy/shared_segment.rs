//! Segments for many blocks, as large as the device has memory for.

use crate::block::SegmentId;
use crate::domain::DomainId;
use crate::driver::{Driver, DriverError, unless_out_of_memory};
use crate::physical::Memory;
use crate::segment::Heap;
use crate::stats::SizeKind;
use crate::units::Bytes;

/// Segments for many blocks, and for large blocks, are multiples of this: the driver allocates no less.
pub(super) const SEGMENT_ROUNDING: Bytes = Bytes::mib(2);

/// Allocates a segment for many blocks, of `least` to `most` bytes. `None` if the driver or the limit refuses
/// even `least`. The segment counts for the large size pool.
///
/// More than half of the remaining memory is taken only if `least` needs it, because other streams and other
/// libraries of the process use the same device. Each further attempt halves the size.
///
/// # Errors
///
/// The driver's error, unless it is out of memory.
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
