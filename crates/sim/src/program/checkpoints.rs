//! The program's checkpoints of its pools.

use std::collections::BTreeMap;

use lowtide_core::{Allocation, Bytes, Checkpoint, DeviceAddress, MempoolId, Stream};

/// The newest checkpoint of each pool.
#[derive(Debug, Default)]
pub(super) struct Checkpoints {
    pub(super) notes: BTreeMap<MempoolId, Note>,
}

/// A checkpoint of one pool.
#[derive(Debug)]
pub(super) struct Note {
    pub(super) checkpoint: Checkpoint,
    /// The blocks that the program had allocated in the pool, by address.
    pub(super) held: Vec<Place>,
    /// Whether memory of the pool may have been released since.
    pub(super) is_doubtful: bool,
}

/// The parts of a block that are restored.
pub(super) type Place = (DeviceAddress, Bytes, Stream);

impl Checkpoints {
    /// Records that a pool may lose memory.
    pub(super) fn doubt(&mut self, pool: MempoolId) {
        if let Some(note) = self.notes.get_mut(&pool) {
            note.is_doubtful = true;
        }
    }
}

/// Returns the parts of a block that are restored.
pub(super) fn place(block: &Allocation) -> Place {
    (block.address, block.size, block.stream)
}
