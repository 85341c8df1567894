//! A recording as a list of steps that any allocator can take.
//!
//! A recording names blocks by the addresses that PyTorch gave them. Another allocator gives other
//! addresses, so a program names them by slots, small numbers that are used again. This is also
//! where everything is told that a recording does not say but implies: calls of `empty_cache`, when
//! a private pool was let go of, and which freed blocks other streams still used.

use std::collections::BTreeMap;

use lowtide_core::{Bytes, DeviceAddress, MempoolId, SegmentSnapshot, Stream};

use crate::card::Card;

/// What a [`Program`] does with a block or with everything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// Asks for a block and keeps it in a slot.
    Allocate {
        slot: Slot,
        size: Bytes,
        stream: Stream,
        pool: MempoolId,
    },
    /// Asks for the block at an address: PyTorch restores a private pool to a checkpoint so. Where
    /// addresses are others, any block will do.
    AllocateAt {
        slot: Slot,
        address: DeviceAddress,
        size: Bytes,
        stream: Stream,
        pool: MempoolId,
    },
    /// Asks for a block that PyTorch could not serve, or could not while a graph was captured.
    AllocateInVain {
        size: Bytes,
        stream: Stream,
        pool: MempoolId,
        in_capture: bool,
    },
    /// Asks for what a private pool held free before the first event. Freed before that, it stays with the pool: no
    /// other request can have it while the pool lives.
    Reserve {
        slot: Slot,
        size: Bytes,
        stream: Stream,
        pool: MempoolId,
    },
    /// Frees the block in a slot, which nothing uses any more.
    Free { slot: Slot },
    /// Frees the block in a slot, which work in another stream still uses: the stream that stands for
    /// it is `user`.
    FreeWhileUsed { slot: Slot, user: User },
    /// The work that used the oldest block of a user is done.
    FinishUse { user: User },
    /// `torch.cuda.empty_cache()`.
    EmptyCache,
    /// The same for what one private pool holds.
    EmptyPool { pool: MempoolId },
    /// A graph or `MemPool` takes hold of a private pool that nothing held.
    HoldPool { pool: MempoolId },
    /// The last holder of a private pool lets go of it.
    ReleasePool { pool: MempoolId },
}

/// The number of a place for a block that is in use.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Slot(pub(crate) u32);

impl Slot {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// The number of a stream that stands for whatever work used blocks of other streams. A recording
/// does not name those streams, only when their work was done; blocks whose work was done in the order
/// in which they were freed share one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct User(pub(crate) u32);

impl User {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// A recording as steps.
#[derive(Debug, Default)]
pub(crate) struct Program {
    pub(crate) steps: Vec<Step>,
    /// For each step, the number of recorded events up to and including what it stands for. The
    /// events from one end to the next are those that PyTorch wrote down during the step; a step that
    /// says what no event says has the end of the step that it belongs to.
    pub(crate) event_ends: Vec<u32>,
    /// How many steps, the first ones, stand for what was there before the first event.
    pub(crate) initial_steps: usize,
    /// How many of those come to the segments that were there then, with the blocks in use.
    pub(crate) adopted_steps: usize,
    /// The slots of the blocks that were in use then, in the order of their addresses.
    pub(crate) initial_slots: Vec<Slot>,
    /// The segments that were there then.
    pub(crate) initial_segments: Vec<SegmentSnapshot>,
    /// Where the ranges begin in which some of those lie, by the addresses of these.
    pub(crate) initial_ranges: BTreeMap<DeviceAddress, DeviceAddress>,
    pub(crate) slots: usize,
    pub(crate) users: usize,
    /// The least that the job was allowed to hold from the driver.
    pub(crate) limit_min: Bytes,
    pub(crate) card: Card,
    /// How many pools the addresses tell apart, where the recording does not say them.
    pub(crate) inferred_pools: Option<usize>,
}

impl Program {
    /// Returns whether any private pool held memory free before the first event.
    pub(crate) fn has_reserves(&self) -> bool {
        self.adopted_steps > self.initial_slots.len()
    }
}
