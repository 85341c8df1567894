//! A recording as a list of steps that any allocator can run.
//!
//! A recording identifies blocks by the addresses that PyTorch returned. Another allocator returns other addresses,
//! so a program identifies blocks by slots: small numbers that are reused.
//!
//! A program also contains three facts that a recording implies but does not say:
//!
//! - calls of `empty_cache`;
//! - when the last holder of a private pool released it;
//! - which freed blocks other streams still used.

use std::collections::BTreeMap;

use lowtide_core::{Bytes, DeviceAddress, MempoolId, SegmentSnapshot, Stream};

use crate::card::Card;

/// One action of a [`Program`]: on a block, on a pool or on the whole cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// Allocates a block into a slot.
    Allocate {
        slot: Slot,
        request: Request,
        /// The block's address, if PyTorch restores a private pool to a checkpoint. In a replay with other addresses,
        /// any block will do.
        at: Option<DeviceAddress>,
    },
    /// Requests a block that PyTorch could not serve, or could not serve while a graph was captured.
    AllocateInVain { request: Request, in_capture: bool },
    /// Requests memory that a private pool held free before the first event. The block is freed before that event
    /// too, and its memory stays with the pool: no other request can use it while the pool is alive.
    Reserve { slot: Slot, request: Request },
    /// Frees the block in a slot. No other stream uses it.
    Free { slot: Slot },
    /// Frees the block in a slot while work in another stream still uses it. `user` is the stream that stands for
    /// that work.
    FreeWhileUsed { slot: Slot, user: User },
    /// The work that used the oldest freed block of a user completes.
    FinishUse { user: User },
    /// `torch.cuda.empty_cache()`.
    EmptyCache,
    /// The same for the memory of one private pool.
    EmptyPool { pool: MempoolId },
    /// A graph or `MemPool` retains a private pool that nothing held.
    HoldPool { pool: MempoolId },
    /// The last holder of a private pool releases it.
    ReleasePool { pool: MempoolId },
}

/// A request for a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Request {
    pub(crate) size: Bytes,
    pub(crate) stream: Stream,
    pub(crate) pool: MempoolId,
}

/// The number of a place for an allocated block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Slot(pub(crate) u32);

impl Slot {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// The number of a stream that stands for other streams' work on freed blocks. A recording does not name those
/// streams, only when their work completed. Blocks whose work completed in the order in which they were freed share
/// one number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct User(pub(crate) u32);

impl User {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// A recording compiled into steps.
#[derive(Debug, Default)]
pub(crate) struct Program {
    pub(crate) steps: Vec<Step>,
    /// For each step, the number of recorded events up to and including the step's own. PyTorch recorded the events
    /// between one end and the next during the step. A step without an event of its own has the end of the step
    /// that it belongs to.
    pub(crate) event_ends: Vec<u32>,
    /// The number of steps at the beginning that set up the state before the first event.
    pub(crate) initial_steps: usize,
    /// The number of those steps that lead to the initial segments and their allocated blocks.
    pub(crate) adopted_steps: usize,
    /// The slots of the blocks in use before the first event, by address.
    pub(crate) initial_slots: Vec<Slot>,
    /// The segments before the first event.
    pub(crate) initial_segments: Vec<SegmentSnapshot>,
    /// For initial segments that lie inside a longer address range, by segment address: the start of the range.
    pub(crate) initial_ranges: BTreeMap<DeviceAddress, DeviceAddress>,
    pub(crate) slots: usize,
    pub(crate) users: usize,
    /// The least limit that the job can have had, in bytes reserved from the driver.
    pub(crate) limit_min: Bytes,
    pub(crate) card: Card,
    /// The number of pools inferred from addresses; `None` if the recording names the pools.
    pub(crate) inferred_pools: Option<usize>,
}

impl Program {
    /// Returns whether any private pool held free memory before the first event.
    pub(crate) fn has_reserves(&self) -> bool {
        self.adopted_steps > self.initial_slots.len()
    }
}
