//! What is held: segments, blocks, and the block at an address.

use std::ffi::{c_int, c_void};

use lowtide_core::{BlockSnapshot, BlockStatus, DeviceAddress, Driver, SegmentSnapshot};

use crate::boundary::{Mempool, run, write_to_c};
use crate::error::{Error, Status};
use crate::pointers::{address_of, pointer_to};
use crate::regions::table;
use crate::{devices, events, start};

/// Whether a block is in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub enum BlockState {
    /// The program holds it.
    Allocated = 0,
    /// The program let go of it, and a stream that used it is not done yet.
    PendingFree = 1,
    /// It can be handed out, or its segment go back.
    Inactive = 2,
}

/// A part of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Block {
    /// Where it starts.
    pub address: u64,
    /// How long it is, rounding included.
    pub size: u64,
    /// What was asked for; of an inactive block, what its last holder asked for, or 0.
    pub requested: u64,
    /// Whether it is in use.
    pub state: BlockState,
}

/// A range of device memory: a segment, or a mapped part of an expandable one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Segment {
    /// Where it starts.
    pub address: u64,
    /// How long it is.
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
    /// Whether its memory is away: `LOWTIDE_ACTION_SEGMENT_PAUSED` was told of it last, to whoever watched.
    pub is_paused: bool,
    /// Grows with each segment that its pool takes, so that it says which came first, on every rank of a
    /// job alike. The parts of an expandable segment have one number.
    pub number: u64,
}

/// Is shown a segment and its `count` blocks, which tile it, in the order of their addresses. Called with
/// the `context` that was given with it, under the device's locks: it must not call lowtide, throw or
/// unwind, nor keep the pointers.
pub type SegmentVisitor = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        segment: *const Segment,
        blocks: *const Block,
        count: usize,
    ),
>;

/// Shows `visit` every segment of a device in the order of their addresses: what the events told so far
/// add up to. A device that is not in use has none.
///
/// Unlike `lowtide_snapshot` this is no event. Takes O(n log n) for n blocks.
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
        // While no pause is told of, so that what is shown is what was told.
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
                    let is_paused = region.is_some_and(|region| region.away_since_us.is_some());
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
    /// Where it starts.
    pub address: u64,
    /// How long it is, rounding included.
    pub size: u64,
    /// What was asked for.
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

/// Writes the block that the program holds at `memory` to `allocation`, or fails with
/// `LOWTIDE_STATUS_NOT_ALLOCATED`. The pointer must be the one that was handed out.
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

/// Writes the size of the largest block that could be handed out: the largest that is free in any memory
/// pool and stream of the device, or what the driver says is free, if that is more. This is what PyTorch
/// tells cuDNN's benchmarks.
///
/// # Safety
///
/// `size` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_largest_free(device: c_int, size: *mut u64) -> Status {
    run(|| {
        let allocator = start::device(device)?;
        let free = allocator.with_all(|device| device.largest_free())?;
        let info = allocator.with_driver(Driver::memory_info)?;
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("size", size, free.max(info.free).get()) }
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
