//! The program's checkpoints of its pools.

use std::collections::BTreeMap;

use lowtide_core::{
    Allocation, Bytes, Checkpoint, Config, DeviceAddress, MempoolId, StrategyName, Stream,
};

/// The newest checkpoint of each pool.
#[derive(Debug)]
pub(super) struct Checkpoints {
    pub(super) notes: BTreeMap<MempoolId, Note>,
    /// Whether a pool keeps its memory as long as its use count is above zero.
    pub(super) keeps_memory: bool,
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
    pub(super) fn new(config: &Config) -> Checkpoints {
        let may_release = |config: &Config| match config {
            // With this option, a request may release the pool's own segments to make room.
            Config::Caching(caching) => caching.max_split_size.is_some(),
            config => config.name() == StrategyName::Direct,
        };
        Checkpoints {
            notes: BTreeMap::new(),
            keeps_memory: !may_release(config),
        }
    }

    /// Records that a pool may lose memory.
    pub(super) fn doubt(&mut self, pool: MempoolId) {
        if let Some(note) = self.notes.get_mut(&pool) {
            note.is_doubtful = true;
        }
    }

    /// Records that any pool may lose memory from now on.
    pub(super) fn doubt_all(&mut self) {
        self.keeps_memory = false;
    }
}

/// Returns the parts of a block that are restored.
pub(super) fn place(block: &Allocation) -> Place {
    (block.address, block.size, block.stream)
}
