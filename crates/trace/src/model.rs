//! What a recording says.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use lowtide_core::{
    Action, BlockStatus, Bytes, DeviceAddress, Event, FreeBlockOrder, MempoolId, SegmentSnapshot,
    Stream,
};

use crate::error::TraceError;
use crate::notes::{Note, NoteId};
use crate::stacks::{StackId, StackTable};
use crate::text::RecordedText;

/// How many sizes a recording says of which requests are rounded up: PyTorch's has 16.
pub(crate) const DIVISIONS_MAX: usize = 64;

/// What one file says.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// One trace for each device that the file says anything about, by device; of a file that has several snapshots, as
    /// of several ranks, those of each in turn.
    pub traces: Vec<Trace>,
    /// The recordings of the host's pinned memory: as traces are, but of no device. One for each snapshot that has it.
    pub host: Vec<Trace>,
    /// What of the file is in neither, each as a sentence without its capital and its end.
    pub left_out: Vec<String>,
    /// Whether the recorder was killed before it wrote the end of the file, so that the last events
    /// and the final segments may be missing. Only of lowtide's own format: a pickle without its end
    /// is an error.
    pub is_cut_off: bool,
}

/// Everything that a recording says about one device.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// What the file calls the snapshot, such as its rank, where it has several.
    pub member: Option<RecordedText>,
    /// The device's number; 0 for the host.
    pub device: u32,
    /// What happened, oldest first.
    ///
    /// Each block that was freed has both a [`Action::FreeRequested`] and a
    /// [`Action::FreeCompleted`]: where a recording left one kind out (PyTorch's `skip_actions`),
    /// reading has put it next to the other.
    pub events: Vec<TraceEvent>,
    /// What was there before the first event. Empty for a recording that is complete.
    pub initial: InitialState,
    /// The segments at the last event, by address; their blocks tile them.
    pub segments: Vec<SegmentSnapshot>,
    /// How many events there were at least after the last of `events`, and before the file's segments were taken: those
    /// that other threads' calls made meanwhile. What the segments show of them is not in `segments`; what is written of
    /// the trace is of one moment, and misses none.
    pub missed_events: u64,
    /// How the allocator was set up.
    pub settings: AllocatorSettings,
    /// The call stacks and notes that events refer to; all devices of a file share one table.
    pub stacks: Arc<StackTable>,
    /// What the program marked in time, oldest first.
    pub annotations: Vec<Annotation>,
    /// The tags of lowtide's regions, by the pools that have their memory.
    pub regions: BTreeMap<MempoolId, RecordedText>,
    /// How many entries had an action that says nothing about memory (`annotate`), or that this
    /// version does not know. They are not among `events`.
    pub skipped_events: u64,
}

/// One event of a [`Trace`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceEvent {
    /// What happened.
    pub event: Event,
    /// Microseconds since 1970, or 0 where the recording does not say.
    pub time_us: i64,
    /// The call stack it happened in.
    pub stack: StackId,
    /// Whether the recording says which pool it happened in; if not, `event.pool` is the default.
    pub pool_known: bool,
    /// What else it says of the event.
    pub note: NoteId,
}

/// What was there before the first event of a recording.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct InitialState {
    /// The segments, by address. They do not overlap.
    pub segments: Vec<InitialSegment>,
    /// The blocks in use, by address. Each lies in one of the segments, and they do not overlap.
    pub blocks: Vec<InitialBlock>,
    /// Whether the blocks are as long as they say, also those that were freed before the end.
    pub has_sizes: bool,
    /// Which of the segments were paused: the [`Action::SegmentPaused`] of each, which was before the first event
    /// and has its region's tag.
    pub paused: Vec<TraceEvent>,
}

/// A segment that was there before the first event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InitialSegment {
    /// Where it starts.
    pub address: DeviceAddress,
    /// How long it is.
    pub size: Bytes,
    /// The stream that its blocks belong to.
    pub stream: Stream,
    /// The pool it belongs to, where the recording says.
    pub pool: Option<MempoolId>,
    /// Whether it serves large requests; told from its size if it was gone before the end.
    pub is_large: bool,
    /// Whether it is a mapped range of an expandable segment.
    pub is_expandable: bool,
}

/// A block that was in use before the first event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InitialBlock {
    /// Where it starts.
    pub address: DeviceAddress,
    /// How long it is, rounding included: at least, for a block that was freed before the end.
    pub size: Bytes,
    /// What was asked for.
    pub requested: Bytes,
    /// The stream it belongs to.
    pub stream: Stream,
    /// The pool it belongs to, where the recording says.
    pub pool: Option<MempoolId>,
    /// [`BlockStatus::Allocated`], or [`BlockStatus::PendingFree`].
    pub status: BlockStatus,
    /// The call stack that allocated it, where it was still there at the end.
    pub stack: StackId,
}

/// How PyTorch's allocator was set up, as far as it decides where blocks go.
///
/// The text is what the process began with. The values beside it are those in force when the snapshot
/// was taken, as the program may have changed them; snapshots of torch 2.1 have none of them. Each is
/// `None` where the recording does not say. PyTorch has one set for all devices of a process.
/// [`Trace::config_in_force`] puts them together.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct AllocatorSettings {
    /// `PYTORCH_CUDA_ALLOC_CONF`, as it was given.
    pub conf: RecordedText,
    /// Blocks of this size and more are never split; `Some(None)` where all may be.
    pub max_split_size: Option<Option<Bytes>>,
    /// The share of the limit above which cached segments are given back; 0 is never.
    pub garbage_collection_threshold: Option<f64>,
    /// Whether segments grow in place.
    pub expandable_segments: Option<bool>,
    /// How many steps there are between powers of two, by size: (MiB, steps), ascending; 0 is no
    /// rounding. Empty where the recording does not say.
    pub roundup_power2_divisions: Vec<(u64, u64)>,
    /// Which of several free blocks of a size served a request, as the release of PyTorch tells.
    pub free_block_order: Option<FreeBlockOrder>,
    /// The strategy of lowtide's that was recorded, as `NAME:CONF` or `NAME`; empty for PyTorch's own
    /// allocator. Only files of lowtide's own format have it.
    pub strategy: RecordedText,
}

/// A mark that the program left in time (`record_function`, the optimizer's step).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Annotation {
    /// Its name.
    pub name: RecordedText,
    /// Whether something begins or ends here.
    pub stage: AnnotationStage,
    /// Microseconds since 1970.
    pub time_us: i64,
}

/// Which end of a range an [`Annotation`] marks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AnnotationStage {
    /// It begins.
    Start,
    /// It ends.
    End,
}

impl Snapshot {
    /// Returns whether a file of one snapshot can hold it.
    ///
    /// # Errors
    ///
    /// If two of its traces are of one device, or of the host, as where a file has the snapshots of several ranks.
    pub(crate) fn check_is_one(&self) -> Result<(), TraceError> {
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

impl Trace {
    /// Returns how many requests were served.
    pub fn allocs(&self) -> usize {
        self.events
            .iter()
            .filter(|event| event.event.action == Action::Alloc)
            .count()
    }

    /// Returns whether there is anything to show: requests, or memory that was held when it was recorded. Linear in the
    /// events where there is none.
    pub fn is_used(&self) -> bool {
        !self.segments.is_empty() || self.allocs() > 0
    }

    /// Returns whether blocks may have been freed of which the recording does not tell: it has no frees, and does not say
    /// what was left at its end. Linear in the events.
    pub fn may_lack_frees(&self) -> bool {
        let is_free = |event: &TraceEvent| {
            matches!(
                event.event.action,
                Action::FreeRequested | Action::FreeCompleted
            )
        };
        self.segments.is_empty() && self.allocs() > 0 && !self.events.iter().any(is_free)
    }

    /// Returns whether memory of regions was away at any time. Linear in the events.
    pub fn has_pauses(&self) -> bool {
        let is_pause = |recorded: &TraceEvent| recorded.event.action.is_pause();
        !self.initial.paused.is_empty() || self.events.iter().any(is_pause)
    }

    /// Returns on how many streams blocks were in use.
    pub fn streams(&self) -> usize {
        let mut streams: BTreeSet<Stream> = self
            .initial
            .blocks
            .iter()
            .map(|block| block.stream)
            .collect();
        let mut last = None;
        for TraceEvent { event, .. } in &self.events {
            if event.action == Action::Alloc && last != Some(event.stream) {
                last = Some(event.stream);
                streams.insert(event.stream);
            }
        }
        streams.len()
    }

    /// Returns the most live bytes there were at once: over the blocks that the program held, the
    /// sum of their requests rounded up to 512 bytes.
    pub fn peak_live_bytes(&self) -> Bytes {
        self.peak(|requested| requested.round_up(Bytes(512)))
    }

    /// Returns the most bytes that the program had asked for and still held at once.
    pub fn peak_requested_bytes(&self) -> Bytes {
        self.peak(|requested| requested)
    }

    /// Returns how many bytes there were in segments before the first event.
    pub fn initial_reserved_bytes(&self) -> Bytes {
        let segments = self.initial.segments.iter();
        segments.map(|segment| segment.size).sum()
    }

    /// Returns the most bytes that the job itself had in segments at once, from what was there before the first event
    /// on. Linear in the events.
    pub fn peak_reserved_bytes(&self) -> Bytes {
        let mut reserved = self.initial_reserved_bytes();
        let mut peak = reserved;
        for TraceEvent { event, .. } in &self.events {
            match event.action {
                Action::SegmentAlloc | Action::SegmentMap => {
                    reserved = reserved.saturating_add(event.size);
                    peak = peak.max(reserved);
                }
                Action::SegmentFree | Action::SegmentUnmap => {
                    reserved = reserved.saturating_sub(event.size);
                }
                _ => {}
            }
        }
        peak
    }

    /// Returns the maximum over time of the sum of `bytes` over the blocks that the program holds:
    /// from [`Action::Alloc`] to [`Action::FreeRequested`].
    fn peak(&self, bytes: impl Fn(Bytes) -> Bytes) -> Bytes {
        let held = |status| status == BlockStatus::Allocated;
        let initial = self
            .initial
            .blocks
            .iter()
            .filter(|block| held(block.status));
        let mut live = initial.fold(Bytes::ZERO, |live, block| {
            live.saturating_add(bytes(block.requested))
        });
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
    /// Returns the event of a segment that is paused or resumed, with a note of its region's tag, which `stacks` then
    /// has.
    ///
    /// # Panics
    ///
    /// If there are 2^24 - 1 other notes.
    pub fn of_pause(event: Event, time_us: i64, tag: &str, stacks: &mut StackTable) -> TraceEvent {
        TraceEvent {
            event,
            time_us,
            stack: StackId::NONE,
            pool_known: true,
            note: stacks.intern_note(Note {
                compile_context: None,
                user_metadata: Some(tag.into()),
            }),
        }
    }

    /// Returns the pool it happened in, where the recording says.
    pub fn pool(&self) -> Option<MempoolId> {
        self.pool_known.then_some(self.event.pool)
    }

    /// Notes the pool it happened in.
    pub(crate) fn set_pool(&mut self, pool: Option<MempoolId>) {
        self.pool_known = pool.is_some();
        self.event.pool = pool.unwrap_or_default();
    }
}

const _: () = assert!(
    size_of::<TraceEvent>() == 64,
    "an event takes one cache line"
);
