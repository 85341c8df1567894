//! Queries about memory: the segments, the blocks, and the block at an address.

use std::ffi::{c_int, c_void};

use lowtide_core::{BlockSnapshot, BlockStatus, DeviceAddress, Driver, SegmentSnapshot};

use crate::boundary::{run, write_to_c};
use crate::error::{Error, Status};
use crate::pointers::{Mempool, address_of, pointer_to};
use crate::regions::table;
use crate::{devices, events, start};

/// The state of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub enum BlockState {
    /// The program holds the block.
    Allocated = 0,
    /// The program freed the block, but a stream that used it is not done yet.
    PendingFree = 1,
    /// The block can be allocated, or its segment released.
    Inactive = 2,
}

/// A part of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Block {
    /// The start address.
    pub address: u64,
    /// The size in bytes, including rounding.
    pub size: u64,
    /// The requested bytes. For an inactive block, the last request that it served, or 0.
    pub requested: u64,
    /// The state of the block.
    pub state: BlockState,
}

/// A range of device memory: a segment, or a mapped part of an expandable one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Segment {
    /// The start address.
    pub address: u64,
    /// The size in bytes.
    pub size: u64,
    /// The device that it is on.
    pub device: c_int,
    /// The stream that its blocks belong to.
    pub stream: *mut c_void,
    /// The memory pool that it belongs to.
    pub pool: Mempool,
    /// Whether it serves large requests.
    pub is_large: bool,
    /// Whether it is a part of an expandable segment.
    pub is_expandable: bool,
    /// Whether its memory is paused: `LOWTIDE_ACTION_SEGMENT_PAUSED` was the last pause event for it.
    pub is_paused: bool,
    /// A number that increases with each segment of the pool, so it gives the order of allocation, the same on
    /// every rank of a job. All parts of an expandable segment have the same number.
    pub number: u64,
}

/// Is called with a segment and its `count` blocks, which cover it without gaps, in address order. Called with
/// the `context` that was registered with it, under the device's locks. It must not call lowtide, throw or
/// unwind, nor keep the pointers.
pub type SegmentVisitor = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        segment: *const Segment,
        blocks: *const Block,
        count: usize,
    ),
>;

/// Calls `visit` for every segment of a device in address order. The segments are the sum of all events so far. A
/// device that is not in use has none.
///
/// Unlike `lowtide_snapshot` this causes no event. Takes O(n log n) for n blocks.
///
/// # Safety
///
/// `visit` may be called with `context` until this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_visit_segments(
    device: c_int,
    visit: SegmentVisitor,
    context: *mut c_void,
) -> Status {
    run(|| {
        let visit = visit.ok_or_else(|| Error::null("visit"))?;
        let Some(allocator) = devices::get(device) else {
            return Ok(());
        };
        // No pause is notified meanwhile, so the segments agree with the events so far.
        events::with_listeners(|_| {
            let regions = table::pools_on(device)?;
            allocator.with_all(|all| {
                let numbers = all.segment_numbers();
                let mut blocks = Vec::new();
                for shown in all.segments() {
                    blocks.clear();
                    blocks.extend(shown.blocks.iter().map(Block::of));
                    let after = numbers.partition_point(|&(start, _)| start <= shown.address);
                    let (_, number) = numbers[after - 1];
                    let region = regions.get(&shown.pool);
                    let is_paused = region.is_some_and(|region| region.paused_since_us.is_some());
                    let segment = Segment::of(device, &shown, number, is_paused);
                    // SAFETY: it may be called with the context, by the contract of this function.
                    unsafe { visit(context, &raw const segment, blocks.as_ptr(), blocks.len()) };
                }
            })?;
            Ok(())
        })
    })
}

/// A block that the program holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Allocation {
    /// The start address.
    pub address: u64,
    /// The size in bytes, including rounding.
    pub size: u64,
    /// The requested bytes.
    pub requested: u64,
    /// The device that it is on.
    pub device: c_int,
    /// The stream that it belongs to.
    pub stream: *mut c_void,
    /// The memory pool that it came from.
    pub pool: Mempool,
    /// Whether it lies in an expandable segment.
    pub is_expandable: bool,
}

/// Writes the block that the program holds at `memory` to `allocation`. `memory` must be the pointer that the
/// allocation returned; otherwise the status is `LOWTIDE_STATUS_NOT_ALLOCATED`.
///
/// # Safety
///
/// `allocation` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_find_allocation(
    memory: *mut c_void,
    allocation: *mut Allocation,
) -> Status {
    run(|| {
        let (device, found) = devices::find_allocation(address_of(memory))?;
        let found = Allocation {
            address: found.address.get(),
            size: found.size.get(),
            requested: found.requested.get(),
            device,
            stream: pointer_to(DeviceAddress(found.stream.0)),
            pool: Mempool::of(found.pool),
            is_expandable: found.is_expandable,
        };
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("allocation", allocation, found) }
    })
}

/// Writes the size of the largest block that could be allocated. It is the larger of the largest free block, in
/// any memory pool and stream of the device, and the driver's free memory. With `tide`, which can use both for one block,
/// it is the sum of idle and free memory, within the limit. PyTorch reports this size to cuDNN's benchmarks.
///
/// # Safety
///
/// `size` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_largest_free(device: c_int, size: *mut u64) -> Status {
    run(|| {
        let allocator = start::device(device)?;
        let free = allocator.physical().driver_mut().memory_info()?.free;
        let largest = allocator.with_all(|device| device.largest_request(free))?;
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("size", size, largest.get()) }
    })
}

impl Block {
    fn of(block: &BlockSnapshot) -> Block {
        Block {
            address: block.address.get(),
            size: block.size.get(),
            requested: block.requested.get(),
            state: match block.status {
                BlockStatus::Allocated => BlockState::Allocated,
                BlockStatus::PendingFree => BlockState::PendingFree,
                BlockStatus::Inactive => BlockState::Inactive,
            },
        }
    }
}

impl Segment {
    fn of(device: c_int, segment: &SegmentSnapshot, number: u64, is_paused: bool) -> Segment {
        Segment {
            address: segment.address.get(),
            size: segment.size.get(),
            device,
            stream: pointer_to(DeviceAddress(segment.stream.0)),
            pool: Mempool::of(segment.pool),
            is_large: segment.is_large,
            is_expandable: segment.is_expandable,
            is_paused,
            number,
        }
    }
}
