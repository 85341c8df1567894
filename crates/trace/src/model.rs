//! The contents of a recording.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use lowtide_core::{
    Action, BlockSnapshot, BlockStatus, Bytes, DeviceAddress, Event, FreeBlockOrder, MempoolId,
    SegmentSnapshot, StrategyName, Stream,
};

use crate::error::{Result, TraceError};
use crate::notes::{Note, NoteId};
use crate::stacks::{StackId, StackTable};
use crate::text::RecordedText;

/// The most sizes with a rounding of their own (`roundup_power2_divisions`) in a recording: PyTorch has 16.
pub(crate) const DIVISIONS_MAX: usize = 64;

/// The contents of one file.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// One trace per device that the file mentions, by device. If the file has several snapshots, such as one per
    /// rank, those of each snapshot in turn.
    pub traces: Vec<Trace>,
    /// The recordings of pinned host memory, one for each snapshot that has it. They are like traces, but of no
    /// device.
    pub host: Vec<Trace>,
    /// Parts of the file that were not read. Each is a sentence without its first capital and its full stop.
    pub left_out: Vec<String>,
    /// Whether the recorder was killed before it wrote the end of the file. The last events and the final segments
    /// may then be missing. Only for lowtide's own format: a truncated pickle is an error.
    pub is_cut_off: bool,
}

/// The recording of one device.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The file's name for the snapshot, such as its rank, if the file has several.
    pub member: Option<RecordedText>,
    /// The device's number; 0 for the host.
    pub device: u32,
    /// The events, oldest first.
    ///
    /// Each block that was freed has both a [`Action::FreeRequested`] and a [`Action::FreeCompleted`]. If a
    /// recording left out one kind (PyTorch's `skip_actions`), reading adds it next to the other.
    pub events: Vec<TraceEvent>,
    /// The segments and blocks that existed before the first event. Empty for a complete recording.
    pub initial: InitialState,
    /// The segments after the last event, by address. Their blocks tile them.
    pub segments: Vec<SegmentSnapshot>,
    /// The least number of events between the last of `events` and the moment when the file's segments were read:
    /// calls by other threads meanwhile. `segments` does not include their effects. A trace is written as of its
    /// last event, so a file written from it misses none.
    pub missed_events: u64,
    /// The allocator's settings.
    pub settings: AllocatorSettings,
    /// The call stacks and notes of the events. All devices of a file share one table.
    pub stacks: Arc<StackTable>,
    /// The program's marks in time, oldest first.
    pub annotations: Vec<Annotation>,
    /// The tags of lowtide's regions, by the pools that hold the regions' memory.
    pub regions: BTreeMap<MempoolId, RecordedText>,
    /// The number of entries that are not among `events`: their action is unknown to this version.
    pub skipped_events: u64,
}

/// One event of a [`Trace`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceEvent {
    /// The event.
    pub event: Event,
    /// Microseconds since 1970; 0 if the recording has no time.
    pub time_us: i64,
    /// The call stack in which it happened.
    pub stack: StackId,
    /// Whether the recording has the event's pool. If not, `event.pool` is the default pool.
    pub pool_known: bool,
    /// The recording's texts about the event.
    pub note: NoteId,
}

/// The memory that existed before the first event of a recording.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct InitialState {
    /// The segments, by address. They do not overlap.
    pub segments: Vec<InitialSegment>,
    /// The blocks in use, by address. Each lies in one of the segments. They do not overlap.
    pub blocks: Vec<InitialBlock>,
    /// Whether all block sizes are exact, also those of blocks that were freed before the end.
    pub has_sizes: bool,
    /// The segments that were paused: for each, the [`Action::SegmentPaused`] that happened before the first event,
    /// with its region's tag.
    pub paused: Vec<TraceEvent>,
}

/// A segment that existed before the first event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InitialSegment {
    /// Its start.
    pub address: DeviceAddress,
    /// Its size.
    pub size: Bytes,
    /// The stream that its blocks belong to.
    pub stream: Stream,
    /// The pool it belongs to, if the recording has it.
    pub pool: Option<MempoolId>,
    /// Whether it serves large requests. Inferred from its size if it was freed before the end.
    pub is_large: bool,
    /// Whether it is a mapped range of an expandable segment.
    pub is_expandable: bool,
}

/// A block that was in use before the first event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InitialBlock {
    /// Its start.
    pub address: DeviceAddress,
    /// Its size, with rounding. A lower bound if the block was freed before the end.
    pub size: Bytes,
    /// The requested bytes.
    pub requested: Bytes,
    /// The stream it belongs to.
    pub stream: Stream,
    /// The pool it belongs to, if the recording has it.
    pub pool: Option<MempoolId>,
    /// [`BlockStatus::Allocated`], or [`BlockStatus::PendingFree`].
    pub status: BlockStatus,
    /// The call stack that allocated it, if the block still existed at the end.
    pub stack: StackId,
}

/// The settings of PyTorch's allocator that decide where blocks go.
///
/// `conf` is the text that the process started with. The other values are those in force when the snapshot was
/// taken, because the program may have changed them. Snapshots of torch 2.1 have none of them. Each is `None` if
/// the recording does not have it. PyTorch has one set for all devices of a process. [`Trace::config_in_force`]
/// combines text and values.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct AllocatorSettings {
    /// `PYTORCH_CUDA_ALLOC_CONF`, as it was set.
    pub conf: RecordedText,
    /// Blocks of this size and more are never split; `Some(None)` if all blocks may be split.
    pub max_split_size: Option<Option<Bytes>>,
    /// The share of the limit above which cached segments are released; 0 means never.
    pub garbage_collection_threshold: Option<f64>,
    /// Whether segments grow in place.
    pub expandable_segments: Option<bool>,
    /// The number of steps between powers of two, by size: (MiB, steps), ascending; 0 steps means no rounding.
    /// Empty if the recording does not have it.
    pub roundup_power2_divisions: Vec<(u64, u64)>,
    /// The order in which free blocks of one size serve requests. It follows from PyTorch's release.
    pub free_block_order: Option<FreeBlockOrder>,
    /// The recorded strategy of lowtide, as `NAME:CONF` or `NAME`; empty for PyTorch's own allocator. In a snapshot,
    /// also empty for `caching`.
    pub strategy: RecordedText,
}

impl AllocatorSettings {
    /// Returns whether PyTorch's allocator served the job, or lowtide's `caching`.
    pub fn is_of_caching(&self) -> bool {
        self.strategy.raw().is_empty() || self.strategy_name() == Some(StrategyName::Caching)
    }

    /// Returns the name of lowtide's strategy that served the job; `None` for PyTorch's own allocator and unknown
    /// names.
    pub fn strategy_name(&self) -> Option<StrategyName> {
        strategy_named(self.strategy.raw())
    }
}

/// Returns the name of the strategy in `NAME:CONF` or `NAME`; `None` for other texts.
pub(crate) fn strategy_named(text: &str) -> Option<StrategyName> {
    text.split(':').next()?.parse().ok()
}

/// A mark that the program set in time (`record_function`, the optimizer's step).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Annotation {
    /// Its name.
    pub name: RecordedText,
    /// Whether it marks a start or an end.
    pub stage: AnnotationStage,
    /// Microseconds since 1970.
    pub time_us: i64,
}

/// The end of a range that an [`Annotation`] marks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AnnotationStage {
    /// The start.
    Start,
    /// The end.
    End,
}

impl Snapshot {
    /// Returns an error unless a file of one snapshot can hold this one.
    ///
    /// # Errors
    ///
    /// If two of its traces are of the same device, or of the host, because a file had the snapshots of several
    /// ranks.
    pub(crate) fn check_is_one(&self) -> Result<()> {
        let mut devices = BTreeSet::new();
        let twice = self
            .traces
            .iter()
            .find(|trace| !devices.insert(trace.device));
        let what = match (twice, &self.host[..]) {
            (Some(trace), _) => format!("device {}", trace.device),
            (None, [_, _, ..]) => "pinned host memory".to_owned(),
            (None, _) => return Ok(()),
        };
        let what = format!(
            "several snapshots have {what}, and a file of this format has one; write each to a file of its own, in Python \
             by pickle.dump"
        );
        Err(TraceError::contradiction(what))
    }
}

impl From<&SegmentSnapshot> for InitialSegment {
    fn from(segment: &SegmentSnapshot) -> InitialSegment {
        InitialSegment {
            address: segment.address,
            size: segment.size,
            stream: segment.stream,
            pool: Some(segment.pool),
            is_large: segment.is_large,
            is_expandable: segment.is_expandable,
        }
    }
}

impl InitialSegment {
    /// Returns the segment with these blocks, which must tile it. Its pool is the default pool if it is not known.
    pub fn with_blocks(&self, blocks: Vec<BlockSnapshot>) -> SegmentSnapshot {
        SegmentSnapshot {
            address: self.address,
            size: self.size,
            stream: self.stream,
            pool: self.pool.unwrap_or_default(),
            is_large: self.is_large,
            is_expandable: self.is_expandable,
            blocks,
        }
    }
}

impl InitialBlock {
    /// Returns a block in use of `segment`, which `stack` allocated.
    pub(crate) fn of(segment: &SegmentSnapshot, block: &BlockSnapshot, stack: StackId) -> Self {
        InitialBlock {
            address: block.address,
            size: block.size,
            requested: block.requested,
            stream: segment.stream,
            pool: Some(segment.pool),
            status: block.status,
            stack,
        }
    }
}

impl Trace {
    /// Returns the number of requests that were served.
    pub fn allocs(&self) -> usize {
        let is_alloc = |event: &&TraceEvent| event.event.action == Action::Alloc;
        self.events.iter().filter(is_alloc).count()
    }

    /// Returns whether the trace has any requests, or segments at its end. Linear in the events if it has neither.
    pub fn is_used(&self) -> bool {
        !self.segments.is_empty() || self.allocs() > 0
    }

    /// Returns whether the recording may lack frees: it has none, and no segments at its end that would show them.
    /// Linear in the events.
    pub fn may_lack_frees(&self) -> bool {
        let is_free = |action| matches!(action, Action::FreeRequested | Action::FreeCompleted);
        let has_frees = || { self.events.iter() }.any(|event| is_free(event.event.action));
        self.segments.is_empty() && self.allocs() > 0 && !has_frees()
    }

    /// Returns whether memory of regions was paused at any time. Linear in the events.
    pub fn has_pauses(&self) -> bool {
        let is_pause = |recorded: &TraceEvent| recorded.event.action.is_pause();
        !self.initial.paused.is_empty() || self.events.iter().any(is_pause)
    }

    /// Returns the number of streams on which blocks were in use. Linear in the events.
    pub fn streams(&self) -> usize {
        let initial = self.initial.blocks.iter();
        let mut streams: BTreeSet<Stream> = initial.map(|block| block.stream).collect();
        let mut last = None;
        for TraceEvent { event, .. } in &self.events {
            if event.action == Action::Alloc && last != Some(event.stream) {
                last = Some(event.stream);
                streams.insert(event.stream);
            }
        }
        streams.len()
    }

    /// Returns the peak live bytes: the sum of the requests of the blocks that the program held, each rounded up to
    /// 512 bytes.
    pub fn peak_live_bytes(&self) -> Bytes {
        self.peak(|requested| requested.round_up(Bytes(512)))
    }

    /// Returns the peak requested bytes of the blocks that the program held.
    pub fn peak_requested_bytes(&self) -> Bytes {
        self.peak(|requested| requested)
    }

    /// Returns the bytes in segments before the first event.
    pub fn initial_reserved_bytes(&self) -> Bytes {
        let segments = self.initial.segments.iter();
        segments.map(|segment| segment.size).sum()
    }

    /// Returns the peak reserved bytes of the job itself, the segments before the first event included. Linear in
    /// the events.
    pub fn peak_reserved_bytes(&self) -> Bytes {
        let initial = self.initial_reserved_bytes();
        self.reserved_bytes().fold(initial, Bytes::max)
    }

    /// Returns the reserved bytes after each event, which include those of the initial segments.
    pub fn reserved_bytes(&self) -> impl Iterator<Item = Bytes> {
        let after = |reserved: &mut Bytes, recorded: &TraceEvent| {
            let size = recorded.event.size;
            *reserved = match recorded.event.action {
                Action::SegmentAlloc | Action::SegmentMap => reserved.saturating_add(size),
                Action::SegmentFree | Action::SegmentUnmap => reserved.saturating_sub(size),
                _ => *reserved,
            };
            Some(*reserved)
        };
        self.events
            .iter()
            .scan(self.initial_reserved_bytes(), after)
    }

    /// Returns the maximum over time of the sum of `bytes` over the blocks that the program holds: from
    /// [`Action::Alloc`] to [`Action::FreeRequested`].
    fn peak(&self, bytes: impl Fn(Bytes) -> Bytes) -> Bytes {
        let is_held = |block: &&InitialBlock| block.status == BlockStatus::Allocated;
        let initial = self.initial.blocks.iter().filter(is_held);
        let initial = initial.map(|block| bytes(block.requested));
        let mut live = initial.fold(Bytes::ZERO, Bytes::saturating_add);
        let mut peak = live;
        for TraceEvent { event, .. } in &self.events {
            match event.action {
                Action::Alloc => {
                    live = live.saturating_add(bytes(event.size));
                    peak = peak.max(live);
                }
                Action::FreeRequested => live = live.saturating_sub(bytes(event.size)),
                _ => {}
            }
        }
        peak
    }
}

impl TraceEvent {
    /// Returns an event with a text as its user metadata, which is added to `stacks`: the tag of a paused region, or
    /// what the program said of a block.
    ///
    /// # Panics
    ///
    /// If `stacks` has 2^24 - 1 other notes.
    pub fn with_metadata(
        event: Event,
        time_us: i64,
        text: &str,
        stacks: &mut StackTable,
    ) -> TraceEvent {
        TraceEvent {
            event,
            time_us,
            stack: StackId::NONE,
            pool_known: true,
            note: stacks.intern_note(Note {
                compile_context: None,
                user_metadata: Some(text.into()),
            }),
        }
    }

    /// Returns the event's pool, if the recording has it.
    pub fn pool(&self) -> Option<MempoolId> {
        self.pool_known.then_some(self.event.pool)
    }

    /// Sets the event's pool.
    pub(crate) fn set_pool(&mut self, pool: Option<MempoolId>) {
        self.pool_known = pool.is_some();
        self.event.pool = pool.unwrap_or_default();
    }
}

const _: () = assert!(
    size_of::<TraceEvent>() == 64,
    "an event takes one cache line"
);
