//! What a program noted of its pools, to bring them back to.

use std::collections::BTreeMap;

use lowtide_core::{
    Allocation, Bytes, Checkpoint, Config, DeviceAddress, MempoolId, StrategyName, Stream,
};

/// What was noted of each pool.
#[derive(Debug)]
pub(super) struct Checkpoints {
    pub(super) notes: BTreeMap<MempoolId, Note>,
    /// Whether memory stays with a pool as long as anything holds it.
    pub(super) keeps_memory: bool,
}

/// What was noted of one pool.
#[derive(Debug)]
pub(super) struct Note {
    pub(super) checkpoint: Checkpoint,
    /// What the program held in the pool, by address.
    pub(super) held: Vec<Place>,
    /// Whether memory of the pool may have gone back since.
    pub(super) is_doubtful: bool,
}

/// What of a block comes back.
pub(super) type Place = (DeviceAddress, Bytes, Stream);

impl Checkpoints {
    pub(super) fn new(config: &Config) -> Checkpoints {
        let may_release = |config: &Config| match config {
            // Makes room for a request from the pool's own segments.
            Config::Caching(caching) => caching.max_split_size.is_some(),
            config => config.name() == StrategyName::Direct,
        };
        Checkpoints {
            notes: BTreeMap::new(),
            keeps_memory: !may_release(config),
        }
    }

    /// Takes note that a pool may lose memory.
    pub(super) fn doubt(&mut self, pool: MempoolId) {
        if let Some(note) = self.notes.get_mut(&pool) {
            note.is_doubtful = true;
        }
    }

    /// Takes note that any pool may lose memory from now on.
    pub(super) fn doubt_all(&mut self) {
        self.keeps_memory = false;
    }
}

/// Returns what of a block comes back.
pub(super) fn place(block: &Allocation) -> Place {
    (block.address, block.size, block.stream)
}
