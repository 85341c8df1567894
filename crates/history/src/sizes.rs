//! How long each block of a recording was: most recordings say only what was asked for.

use hashbrown::HashMap;
use lowtide_core::{Action, BlockStatus, Bytes, Config, DeviceAddress};
use lowtide_replay::{Job, Progress};
use lowtide_trace::Trace;

use crate::placed;

/// The most that a request is rounded up by where its block's size is not known.
const ROUNDING_MAX: Bytes = Bytes(512);

/// How long each block of a recording was, rounding included.
#[derive(Clone, Debug)]
pub struct BlockSizes {
    /// Those that were there before the first event, by address, then one for each [`Action::Alloc`];
    /// `None` where they are not all known.
    verified: Option<Vec<Bytes>>,
    /// Those of blocks that were there at the end, by the same numbers, where the others are not known.
    at_end: HashMap<usize, Bytes>,
    /// What the other requests are rounded up to.
    unit: Bytes,
}

impl BlockSizes {
    /// Returns the sizes by a replay with the job's own settings, where that leads to the recorded
    /// addresses, as it does for PyTorch's allocator; those of lowtide's other strategies by where the blocks lay;
    /// else those of [`BlockSizes::estimated`]. Takes as long as the replay.
    pub fn of(trace: &Trace, progress: &dyn Progress) -> BlockSizes {
        let strategy: Option<Config> = trace.settings.strategy.raw().parse().ok();
        let sizes = match strategy.filter(|config| !matches!(config, Config::Caching(_))) {
            Some(config) => placed::block_sizes(trace, &config),
            None => {
                let (config, _) = trace.config_as_understood();
                let replayed = Job::new(trace).block_sizes(&Config::Caching(config), progress);
                // What cannot be replayed can still be looked at.
                replayed.ok().flatten()
            }
        };
        sizes.map_or_else(|| BlockSizes::estimated(trace), BlockSizes::known)
    }

    /// Returns sizes that are known: those of the blocks that were there before the first event, by
    /// address, then one for each [`Action::Alloc`].
    pub fn known(sizes: Vec<Bytes>) -> BlockSizes {
        BlockSizes {
            verified: Some(sizes),
            at_end: HashMap::new(),
            unit: ROUNDING_MAX,
        }
    }

    /// Returns the sizes of blocks in the host's pinned memory, of which PyTorch records what it rounded to. Linear time.
    pub fn of_host(trace: &Trace) -> BlockSizes {
        let before = trace.initial.blocks.iter().map(|block| block.size);
        let events = trace.events.iter().map(|recorded| recorded.event);
        let requests = events.filter(|event| event.action == Action::Alloc);
        BlockSizes::known(before.chain(requests.map(|event| event.size)).collect())
    }

    /// Returns the sizes of the blocks that were there at the end, as the recording has them, and of the
    /// others the requests rounded up to 512 bytes, or to what all addresses are multiples of, if that is
    /// less: so no block reaches into the next. Linear time.
    pub fn estimated(trace: &Trace) -> BlockSizes {
        let mut bits = ROUNDING_MAX.get();
        for event in &trace.events {
            let event = event.event;
            bits |= match event.action {
                Action::Alloc => event.address.get(),
                action if action.is_segment() => event.address.get() | event.size.get(),
                _ => 0,
            };
        }
        for block in &trace.initial.blocks {
            bits |= block.address.get();
        }
        for segment in &trace.initial.segments {
            bits |= segment.address.get() | segment.size.get();
        }
        BlockSizes {
            verified: None,
            at_end: sizes_at_end(trace),
            unit: Bytes(1 << bits.trailing_zeros()),
        }
    }

    /// Returns whether the sizes are those that the job had.
    pub fn are_verified(&self) -> bool {
        self.verified.is_some()
    }

    /// Returns how long a block was for which `requested` was asked: the `number`-th, those that were
    /// there before the first event counted first.
    pub(crate) fn size(&self, number: usize, requested: Bytes) -> Bytes {
        match &self.verified {
            Some(sizes) => sizes[number],
            None => match self.at_end.get(&number) {
                Some(&size) => size,
                None => requested.max(Bytes(1)).round_up(self.unit),
            },
        }
    }
}

/// Returns the sizes of the blocks that were there at the end and were handed out during the recording.
fn sizes_at_end(trace: &Trace) -> HashMap<usize, Bytes> {
    let blocks = trace.segments.iter().flat_map(|segment| &segment.blocks);
    let mut in_use: HashMap<DeviceAddress, Bytes> = blocks
        .filter(|block| block.status != BlockStatus::Inactive)
        .map(|block| (block.address, block.size))
        .collect();
    let mut sizes = HashMap::new();
    let mut number = trace.initial.blocks.len() + trace.allocs();
    for recorded in trace.events.iter().rev() {
        if in_use.is_empty() {
            break;
        }
        if recorded.event.action == Action::Alloc {
            number -= 1;
            // The last block at an address is the one that is there still, unless that is too short for it.
            let size = in_use.remove(&recorded.event.address);
            sizes.extend(
                size.filter(|&size| size >= recorded.event.size)
                    .map(|size| (number, size)),
            );
        }
    }
    sizes
}
