//! The size of each block of a recording. Most recordings have only the requested bytes.

use hashbrown::HashMap;
use lowtide_core::{Action, BlockStatus, Bytes, Config, DeviceAddress};
use lowtide_replay::{Job, Progress};
use lowtide_trace::Trace;

use crate::placed;

/// The rounding of a request whose block size is unknown, at most.
const ROUNDING_MAX: Bytes = Bytes(512);

/// The size of each block of a recording, with rounding.
#[derive(Clone, Debug)]
pub struct BlockSizes {
    /// The sizes of the blocks from before the first event, by address, then one for each [`Action::Alloc`]; `None`
    /// if not all are known.
    verified: Option<Vec<Bytes>>,
    /// The sizes of blocks that exist at the end, by the same numbers, if the others are unknown.
    at_end: HashMap<usize, Bytes>,
    /// The size that other requests are rounded up to a multiple of.
    unit: Bytes,
}

impl BlockSizes {
    /// Returns the sizes of a job's blocks:
    /// - for PyTorch's allocator, by a replay with the job's own settings, if it leads to the recorded addresses,
    /// - for lowtide's other strategies, from the blocks' addresses,
    /// - otherwise those of [`BlockSizes::estimated`].
    ///
    /// Takes as long as the replay.
    pub fn of(trace: &Trace, progress: &dyn Progress) -> BlockSizes {
        let strategy: Option<Config> = trace.settings.strategy.raw().parse().ok();
        let sizes = match strategy.filter(|config| !matches!(config, Config::Caching(_))) {
            Some(config) => placed::block_sizes(trace, &config),
            None => {
                let (config, _) = trace.config_as_understood();
                let replayed = Job::new(trace).block_sizes(&Config::Caching(config), progress);
                // A recording that cannot be replayed can still be shown.
                replayed.ok().flatten()
            }
        };
        sizes.map_or_else(|| BlockSizes::estimated(trace), BlockSizes::known)
    }

    /// Returns sizes that are known: first those of the blocks from before the first event, by address, then one
    /// for each [`Action::Alloc`].
    pub fn known(sizes: Vec<Bytes>) -> BlockSizes {
        BlockSizes {
            verified: Some(sizes),
            at_end: HashMap::new(),
            unit: ROUNDING_MAX,
        }
    }

    /// Returns the sizes of blocks in pinned host memory, whose rounded sizes PyTorch records. Linear time.
    pub fn of_host(trace: &Trace) -> BlockSizes {
        let before = trace.initial.blocks.iter().map(|block| block.size);
        let events = trace.events.iter().map(|recorded| recorded.event);
        let requests = events.filter(|event| event.action == Action::Alloc);
        BlockSizes::known(before.chain(requests.map(|event| event.size)).collect())
    }

    /// Returns the recorded sizes of the blocks that exist at the end. For other blocks it returns the requests
    /// rounded up to 512 bytes, or to the largest power of two of which all addresses are multiples, if that is
    /// less. So no block reaches into the next. Linear time.
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

    /// Returns whether all sizes are those of the job.
    pub fn are_verified(&self) -> bool {
        self.verified.is_some()
    }

    /// Returns the size of the block number `number`, for a request of `requested` bytes. Blocks from before the
    /// first event are counted first.
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

/// Returns the sizes of the blocks that exist at the end and were allocated during the recording.
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
            // The last block allocated at an address still exists, unless its request is larger than the block at
            // the end.
            let size = in_use.remove(&recorded.event.address);
            let size = size.filter(|&size| size >= recorded.event.size);
            sizes.extend(size.map(|size| (number, size)));
        }
    }
    sizes
}
