//! Tests that recordings of a small simulated allocator, written and read back in both formats, keep everything.
//! The memory before the first event is recovered, although no file contains it.
//!
//! Not covered here: expandable segments (their rules have tests beside the code).

mod changes;

use std::path::Path;
use std::sync::Arc;

use changes::{assert_says_the_same, change, change_snapshot};
use lowtide_core::{
    Action, BlockSnapshot, BlockStatus, Bytes, DeviceAddress, Event, FreeBlockOrder, MempoolId,
    SegmentSnapshot, Stream,
};
use lowtide_trace::{
    AllocatorSettings, Annotation, AnnotationStage, Frame, InitialBlock, InitialSegment,
    InitialState, Note, NoteId, RecordedStr, RecordedText, Snapshot, StackId, StackTable, Trace,
    TraceEvent, read, read_from, write_compact, write_pickle,
};
use proptest::prelude::*;

const SEGMENTS: usize = 4;
const SLOTS: usize = 4;

/// An operation of the simulated allocator. Each segment has a few slots, for one block each.
#[derive(Clone, Debug)]
enum Op {
    /// Allocates the slot, and first its segment if that does not exist.
    Alloc {
        segment: usize,
        slot: usize,
        size: u64,
        stack: usize,
    },
    FreeRequested {
        segment: usize,
        slot: usize,
    },
    FreeCompleted {
        segment: usize,
        slot: usize,
    },
    /// Frees the segment if all its slots are free.
    SegmentFree {
        segment: usize,
    },
    OutOfMemory {
        size: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let place = (0..SEGMENTS, 0..SLOTS);
    prop_oneof![
        4 => (place.clone(), 1..=100_000_u64, 0..3_usize)
            .prop_map(|((segment, slot), size, stack)| Op::Alloc { segment, slot, size, stack }),
        3 => place.clone().prop_map(|(segment, slot)| Op::FreeRequested { segment, slot }),
        3 => place.prop_map(|(segment, slot)| Op::FreeCompleted { segment, slot }),
        2 => (0..SEGMENTS).prop_map(|segment| Op::SegmentFree { segment }),
        1 => (0..=1_u64 << 50).prop_map(|size| Op::OutOfMemory { size }),
    ]
}

#[derive(Clone, Copy)]
struct Slot {
    requested: Bytes,
    status: BlockStatus,
    stack: StackId,
    /// Identifies the block among those that use the same slot.
    generation: usize,
}

/// The allocator. A segment exists from one `SegmentAlloc` to the next `SegmentFree`, each time in another pool.
#[derive(Clone, Default)]
struct Model {
    segments: [Option<(usize, [Option<Slot>; SLOTS])>; SEGMENTS],
    generations: usize,
    events: Vec<(TraceEvent, usize)>,
}

fn segment_address(segment: usize) -> DeviceAddress {
    DeviceAddress(0x7f00_0000_0000 + ((segment as u64) << 25))
}

fn segment_size(segment: usize) -> Bytes {
    if segment.is_multiple_of(2) {
        Bytes::mib(2)
    } else {
        Bytes::mib(20)
    }
}

fn slot_address(segment: usize, slot: usize) -> DeviceAddress {
    segment_address(segment) + Bytes::kib(256) + Bytes(slot as u64 * 131_072)
}

fn stream(segment: usize) -> Stream {
    Stream(segment as u64 / 2 * 0x5555_0000)
}

/// The pool of the segment that was allocated as the `generation`-th.
fn pool(generation: usize) -> MempoolId {
    MempoolId(generation as u64 % 3, generation as u64)
}

impl Model {
    fn record(
        &mut self,
        action: Action,
        segment: usize,
        address: DeviceAddress,
        size: Bytes,
        stack: StackId,
    ) {
        let generation = self.segments[segment]
            .as_ref()
            .map_or(usize::MAX, |segment| segment.0);
        let event = Event {
            action,
            pool: MempoolId::DEFAULT,
            address,
            size,
            stream: stream(segment),
        };
        let time_us = 1_795_223_068_669_434 + self.events.len() as i64 * 3;
        self.events.push((
            TraceEvent {
                event,
                time_us,
                stack,
                pool_known: false,
                note: NoteId::NONE,
            },
            generation,
        ));
    }

    fn run(&mut self, op: &Op, stacks: &[StackId; 3]) {
        match *op {
            Op::Alloc {
                segment,
                slot,
                size,
                stack,
            } => self.allocate(segment, slot, Bytes(size), stacks[stack]),
            Op::FreeRequested { segment, slot } => {
                if let Some((_, slots)) = &mut self.segments[segment]
                    && let Some(block) = &mut slots[slot]
                    && block.status == BlockStatus::Allocated
                {
                    block.status = BlockStatus::PendingFree;
                    let size = block.requested;
                    self.record(
                        Action::FreeRequested,
                        segment,
                        slot_address(segment, slot),
                        size,
                        stacks[0],
                    );
                }
            }
            Op::FreeCompleted { segment, slot } => {
                if let Some((_, slots)) = &mut self.segments[segment]
                    && let Some(block) = slots[slot]
                    && block.status == BlockStatus::PendingFree
                {
                    slots[slot] = None;
                    let (address, size) = (slot_address(segment, slot), block.requested);
                    self.record(Action::FreeCompleted, segment, address, size, stacks[0]);
                }
            }
            Op::SegmentFree { segment } => {
                if let Some((_, slots)) = &self.segments[segment]
                    && slots.iter().all(Option::is_none)
                {
                    let (address, size) = (segment_address(segment), segment_size(segment));
                    self.record(Action::SegmentFree, segment, address, size, stacks[0]);
                    self.segments[segment] = None;
                }
            }
            Op::OutOfMemory { size } => {
                self.record(
                    Action::OutOfMemory,
                    0,
                    DeviceAddress(123_456),
                    Bytes(size),
                    stacks[1],
                );
                let last = self.events.last_mut();
                last.expect("it was just recorded").1 = usize::MAX;
            }
        }
    }

    fn allocate(&mut self, segment: usize, slot: usize, requested: Bytes, stack: StackId) {
        if self.segments[segment].is_none() {
            self.generations += 1;
            self.segments[segment] = Some((self.generations, [None; SLOTS]));
            let (address, size) = (segment_address(segment), segment_size(segment));
            self.record(Action::SegmentAlloc, segment, address, size, stack);
        }
        let generation = self.events.len();
        if let Some((_, slots)) = &mut self.segments[segment]
            && slots[slot].is_none()
        {
            slots[slot] = Some(Slot {
                requested,
                status: BlockStatus::Allocated,
                stack,
                generation,
            });
            let address = slot_address(segment, slot);
            self.record(Action::Alloc, segment, address, requested, stack);
        }
    }

    /// Returns the segments with their blocks, as in a snapshot.
    fn snapshot(&self) -> Vec<SegmentSnapshot> {
        let there = |segment: usize| Some((segment, self.segments[segment].as_ref()?));
        (0..SEGMENTS)
            .filter_map(there)
            .map(|(segment, (generation, slots))| {
                let mut address = segment_address(segment);
                let end = address + segment_size(segment);
                let mut blocks = Vec::new();
                let mut add = |size: Bytes, requested, status| {
                    if !size.is_zero() {
                        blocks.push(BlockSnapshot {
                            address,
                            size,
                            requested,
                            status,
                        });
                        address = address + size;
                    }
                    address
                };
                let mut at = segment_address(segment);
                for (slot, block) in (0..).zip(slots) {
                    let Some(block) = block else { continue };
                    let start = slot_address(segment, slot);
                    add(start.offset_from(at), Bytes(17), BlockStatus::Inactive);
                    at = add(
                        block.requested.round_up(Bytes(512)),
                        block.requested,
                        block.status,
                    );
                }
                add(end.offset_from(at), Bytes::ZERO, BlockStatus::Inactive);
                SegmentSnapshot {
                    address: segment_address(segment),
                    size: segment_size(segment),
                    stream: stream(segment),
                    pool: pool(*generation),
                    is_large: !segment.is_multiple_of(2),
                    is_expandable: false,
                    blocks,
                }
            })
            .collect()
    }

    /// Returns the memory before the first event, if `self` was then. It has only what can be inferred from `end`.
    fn initial(&self, end: &Model) -> InitialState {
        let mut initial = InitialState::default();
        for (segment, state) in self.segments.iter().enumerate() {
            let Some((generation, slots)) = state else {
                continue;
            };
            let at_end = end.segments[segment]
                .as_ref()
                .filter(|at_end| at_end.0 == *generation);
            let pool = at_end.map(|_| pool(*generation));
            initial.segments.push(InitialSegment {
                address: segment_address(segment),
                size: segment_size(segment),
                stream: stream(segment),
                pool,
                is_large: !segment.is_multiple_of(2),
                is_expandable: false,
            });
            for (slot, block) in slots.iter().enumerate() {
                let Some(block) = block else { continue };
                let stays = at_end
                    .and_then(|at_end| at_end.1[slot])
                    .is_some_and(|at_end| at_end.generation == block.generation);
                initial.blocks.push(InitialBlock {
                    address: slot_address(segment, slot),
                    size: block.requested.round_up(Bytes(512)),
                    requested: block.requested,
                    stream: stream(segment),
                    pool,
                    status: block.status,
                    stack: if stays { block.stack } else { StackId::NONE },
                });
            }
        }
        initial
    }
}

fn trace(
    device: u32,
    ops: &[Op],
    lost: usize,
    table: &Arc<StackTable>,
    stacks: &[StackId; 3],
    notes: &[NoteId; 4],
) -> Trace {
    let lost = lost.min(ops.len());
    let mut begin = Model::default();
    ops[..lost].iter().for_each(|op| begin.run(op, stacks));
    let mut end = begin.clone();
    ops[lost..].iter().for_each(|op| end.run(op, stacks));
    let at_end: Vec<usize> = end
        .segments
        .iter()
        .flatten()
        .map(|segment| segment.0)
        .collect();
    let events = end.events[begin.events.len()..].iter().enumerate().map(
        |(index, &(mut event, generation))| {
            event.note = notes[index / 2 % notes.len()];
            event.pool_known = at_end.contains(&generation);
            if event.pool_known {
                event.event.pool = pool(generation);
            }
            event
        },
    );
    Trace {
        member: None,
        device,
        events: events.collect(),
        initial: begin.initial(&end),
        segments: end.snapshot(),
        missed_events: 0,
        settings: AllocatorSettings {
            conf: "max_split_size_mb:512".into(),
            max_split_size: Some(Some(Bytes::mib(512))),
            garbage_collection_threshold: Some(0.75),
            expandable_segments: Some(false),
            roundup_power2_divisions: vec![(1, 4), (32768, 8)],
            free_block_order: Some(FreeBlockOrder::SegmentAge),
            strategy: RecordedText::default(),
        },
        stacks: Arc::clone(table),
        annotations: vec![
            Annotation {
                name: "step".into(),
                stage: AnnotationStage::Start,
                time_us: -5,
            },
            Annotation {
                name: "step".into(),
                stage: AnnotationStage::End,
                time_us: i64::MAX,
            },
        ],
        regions: [(MempoolId(4, 2), "kv cache".into())].into(),
        skipped_events: 0,
    }
}

fn snapshot(devices: &[(u32, Vec<Op>, usize)]) -> Snapshot {
    let mut table = StackTable::new();
    let frame = |name, line| Frame {
        name: RecordedStr::from(name),
        filename: "a dir/träin.py".into(),
        line,
    };
    let stacks = [
        StackId::NONE,
        table.intern([frame("inner", 1), frame("outer", 70_000)]),
        table.intern([frame("outer", 70_000)]),
    ];
    let mut note = |compile_context: Option<&str>, user_metadata: Option<&str>| {
        table.intern_note(Note {
            compile_context: compile_context.map(RecordedStr::from),
            user_metadata: user_metadata.map(RecordedStr::from),
        })
    };
    let notes = [
        note(Some("N/A"), Some("")),
        note(None, None),
        note(Some("0/1"), None),
        note(None, Some("a step\n")),
    ];
    let table = Arc::new(table);
    let traces = devices
        .iter()
        .map(|(device, ops, lost)| trace(*device, ops, *lost, &table, &stacks, &notes));
    let is_something = |trace: &Trace| !trace.events.is_empty() || !trace.segments.is_empty();
    // The host's recording is like a device's, without the fields that PyTorch has for devices alone.
    let host = devices.first().map(|(_, ops, lost)| Trace {
        settings: AllocatorSettings::default(),
        annotations: Vec::new(),
        regions: [].into(),
        ..trace(0, ops, *lost, &table, &stacks, &notes)
    });
    Snapshot {
        traces: traces.filter(is_something).collect(),
        host: host.into_iter().filter(is_something).collect(),
        ..Snapshot::default()
    }
}

/// Asserts that two snapshots are equal. Their stacks may have different numbers.
#[track_caller]
fn assert_same(one: &Snapshot, other: &Snapshot) {
    assert_eq!(one.is_cut_off, other.is_cut_off);
    assert_eq!(one.traces.len(), other.traces.len());
    assert_eq!(one.host.len(), other.host.len());
    let ones = one.traces.iter().chain(&one.host);
    for (one, other) in ones.zip(other.traces.iter().chain(&other.host)) {
        let frames = |trace: &Trace, stack| {
            let frames = trace.stacks.frames(stack);
            let own = frames.map(|frame| {
                (
                    frame.name.raw().to_owned(),
                    frame.filename.raw().to_owned(),
                    frame.line,
                )
            });
            own.collect::<Vec<_>>()
        };
        assert_eq!(one.device, other.device);
        assert_eq!(one.events.len(), other.events.len());
        for (event, same) in one.events.iter().zip(&other.events) {
            assert_eq!(
                *event,
                TraceEvent {
                    stack: event.stack,
                    note: event.note,
                    ..*same
                }
            );
            assert_eq!(one.stacks.note(event.note), other.stacks.note(same.note));
            assert_eq!(frames(one, event.stack), frames(other, same.stack));
        }
        assert_eq!(one.initial.segments, other.initial.segments);
        assert_eq!(one.initial.blocks.len(), other.initial.blocks.len());
        for (block, same) in one.initial.blocks.iter().zip(&other.initial.blocks) {
            assert_eq!(
                *block,
                InitialBlock {
                    stack: block.stack,
                    ..*same
                }
            );
            assert_eq!(frames(one, block.stack), frames(other, same.stack));
        }
        assert_eq!(one.segments, other.segments);
        assert_eq!(one.settings, other.settings);
        assert_eq!(one.annotations, other.annotations);
        assert_eq!(one.regions, other.regions);
        assert_eq!(one.skipped_events, other.skipped_events);
    }
}

fn pickled(snapshot: &Snapshot) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_pickle(snapshot, &mut bytes).expect("memory takes everything");
    bytes
}

fn compact(snapshot: &Snapshot) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_compact(snapshot, &mut bytes).expect("memory takes everything");
    bytes
}

fn devices() -> impl Strategy<Value = Vec<(u32, Vec<Op>, usize)>> {
    let ops = || proptest::collection::vec(op(), 0..120);
    (ops(), 0..100_usize, ops(), 0..100_usize)
        .prop_map(|(first, lost, third, lost_too)| vec![(0, first, lost), (2, third, lost_too)])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Any contents of a snapshot, also numbers and texts that no job has.
    #[test]
    fn what_is_written_can_be_read(devices in devices(), changes in proptest::collection::vec(change(), 1..4)) {
        let mut snapshot = snapshot(&devices);
        changes.iter().for_each(|change| change_snapshot(&mut snapshot, change));
        let mut bytes = Vec::new();
        match write_pickle(&snapshot, &mut bytes) {
            Ok(()) => assert_says_the_same(read_from(&bytes[..]), &snapshot),
            Err(error) => prop_assert!(!error.to_string().contains(['\n', '\r'])),
        }
        let mut bytes = Vec::new();
        match write_compact(&snapshot, &mut bytes) {
            Ok(()) => assert_says_the_same(read_from(&bytes[..]), &snapshot),
            Err(error) => prop_assert!(!error.to_string().contains(['\n', '\r'])),
        }
    }

    #[test]
    fn what_is_written_reads_back(devices in devices()) {
        let snapshot = snapshot(&devices);
        assert_same(&read_from(&pickled(&snapshot)[..]).unwrap(), &snapshot);
        assert_same(&read_from(&compact(&snapshot)[..]).unwrap(), &snapshot);
    }

    #[test]
    fn damaged_files_never_panic(devices in devices(), damage in proptest::collection::vec((any::<usize>(), any::<u8>()), 1..4)) {
        let snapshot = snapshot(&devices);
        for mut bytes in [pickled(&snapshot), compact(&snapshot)] {
            for &(position, byte) in &damage {
                let position = position % bytes.len();
                bytes[position] = byte;
            }
            if let Err(error) = read_from(&bytes[..]) {
                assert!(!error.to_string().contains('\n'), "{error}");
            }
        }
    }
}

/// A few operations with a result of every kind.
fn example() -> Snapshot {
    let alloc = |segment, slot, size| Op::Alloc {
        segment,
        slot,
        size,
        stack: 1,
    };
    let ops = vec![
        alloc(0, 0, 1000),
        alloc(1, 1, 70_000),
        Op::FreeRequested {
            segment: 1,
            slot: 1,
        },
        alloc(0, 3, 5),
        Op::FreeCompleted {
            segment: 1,
            slot: 1,
        },
        Op::SegmentFree { segment: 1 },
        Op::OutOfMemory { size: 1 << 40 },
        Op::FreeRequested {
            segment: 0,
            slot: 0,
        },
    ];
    snapshot(&[(0, ops.clone(), 3), (2, ops, 0)])
}

#[test]
fn a_compact_file_that_was_cut_off_says_what_it_has() {
    let bytes = compact(&example());
    let mut event_counts = Vec::new();
    for count in 10..bytes.len() {
        // Without the segments at the end, nothing contradicts the events in the file.
        let snapshot = read_from(&bytes[..count]).unwrap();
        assert!(snapshot.is_cut_off, "cut at {count}");
        event_counts.push(
            snapshot
                .traces
                .iter()
                .map(|trace| trace.events.len())
                .sum::<usize>(),
        );
    }
    assert!(event_counts.is_sorted());
    let all: usize = example()
        .traces
        .iter()
        .map(|trace| trace.events.len())
        .sum();
    assert_eq!(event_counts.last(), Some(&all));
    for count in 1..10 {
        assert!(read_from(&bytes[..count]).is_err());
    }
}

#[test]
fn damage_to_a_compact_file_is_noticed() {
    let bytes = compact(&example());
    for position in 15..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[position] ^= 0x10;
        match read_from(&damaged[..]) {
            Ok(snapshot) => {
                // A section may have become one of a later version, or may extend beyond the end.
                let events = |snapshot: &Snapshot| {
                    snapshot
                        .traces
                        .iter()
                        .map(|trace| trace.events.len())
                        .sum::<usize>()
                };
                assert!(snapshot.is_cut_off || events(&snapshot) <= events(&example()));
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    let mut damaged = bytes.clone();
    damaged[15] ^= 0x10;
    let error = read_from(&damaged[..]).unwrap_err();
    assert!(error.is_malformed());
    assert_eq!(
        error.to_string(),
        "byte 10: the checksum of the section is wrong"
    );
}

#[test]
fn a_newer_version_is_refused() {
    let mut bytes = compact(&example());
    bytes[8] = 6;
    let error = read_from(&bytes[..]).unwrap_err();
    assert!(error.is_newer_version());
    assert_eq!(
        error.to_string(),
        "version 6 of lowtide's format; this lowtide reads up to 5, update it"
    );
}

#[test]
fn what_settings_are_off_and_what_are_not_said_reads_back() {
    let off = AllocatorSettings {
        conf: "expandable_segments:True".into(),
        max_split_size: Some(None),
        garbage_collection_threshold: Some(0.0),
        expandable_segments: Some(false),
        roundup_power2_divisions: vec![(1, 0)],
        free_block_order: Some(FreeBlockOrder::Address),
        strategy: RecordedText::default(),
    };
    let of_buddy = AllocatorSettings {
        conf: RecordedText::default(),
        strategy: "buddy:arena_size_mb:32".into(),
        ..off.clone()
    };
    let only_one = AllocatorSettings {
        garbage_collection_threshold: Some(0.0),
        ..AllocatorSettings::default()
    };
    for settings in [off, of_buddy, only_one, AllocatorSettings::default()] {
        let mut original = example();
        for trace in &mut original.traces {
            trace.settings = settings.clone();
        }
        assert_same(&read_from(&pickled(&original)[..]).unwrap(), &original);
        assert_same(&read_from(&compact(&original)[..]).unwrap(), &original);
    }
}

/// The written segments are those at the last event, whatever the source file had.
#[test]
fn what_is_written_misses_no_events() {
    let mut snapshot = example();
    snapshot.traces[0].missed_events = 7;
    for bytes in [pickled(&snapshot), compact(&snapshot)] {
        let read = read_from(&bytes[..]).unwrap();
        assert_eq!(read.traces[0].missed_events, 0);
    }
}

#[test]
fn an_order_of_free_blocks_among_the_options_is_read() {
    let mut original = example();
    for trace in &mut original.traces {
        trace.settings.conf = "max_split_size_mb:64,free_block_order:block_age".into();
        trace.settings.free_block_order = None;
    }
    let snapshot = read_from(&pickled(&original)[..]).unwrap();
    let order = snapshot.traces[0].settings.free_block_order;
    assert_eq!(order, Some(FreeBlockOrder::BlockAge));
}

#[test]
fn a_pickle_has_one_set_of_settings() {
    let mut snapshot = example();
    let mut other = snapshot.traces[0].clone();
    other.device = 5;
    other.settings.conf = RecordedText::default();
    snapshot.traces.push(other);
    let error = write_pickle(&snapshot, Vec::new()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "devices 0 and 5 have different settings, and a snapshot has one set for all; write them to \
         one file each"
    );
    snapshot.traces.pop();
    write_pickle(&snapshot, Vec::new()).unwrap();
}

/// `data/version1.lowtide` is `data/devices.pickle`, as lowtide wrote it before version 2.
#[test]
fn an_older_version_is_read() {
    let data = |name| {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/data")
            .join(name)
    };
    let old = read(&data("version1.lowtide")).unwrap();
    let mut same = read(&data("devices.pickle")).unwrap();
    for trace in &mut same.traces {
        // Version 1 does not distinguish a setting that is off from one that is not recorded.
        assert_eq!(trace.settings.expandable_segments.take(), Some(false));
        // Version 1 has no notes.
        assert!(trace.events.iter().any(|event| event.note != NoteId::NONE));
        trace
            .events
            .iter_mut()
            .for_each(|event| event.note = NoteId::NONE);
        // It has no annotations of blocks, either: they are left out, and counted.
        let before = trace.events.len();
        trace
            .events
            .retain(|event| event.event.action != Action::Annotate);
        trace.skipped_events += (before - trace.events.len()) as u64;
    }
    assert_same(&old, &same);
}

/// Adds a pause and a resume of a region, with its tag.
fn paused_and_resumed(trace: &mut Trace) {
    let stacks = Arc::make_mut(&mut trace.stacks);
    let note = stacks.intern_note(Note {
        compile_context: None,
        user_metadata: Some("kv".into()),
    });
    let (segment, last) = (
        &trace.segments[0],
        *trace.events.last().expect("it has events"),
    );
    for action in [Action::SegmentPaused, Action::SegmentResumed] {
        trace.events.push(TraceEvent {
            event: Event {
                action,
                pool: segment.pool,
                address: segment.address,
                size: segment.size,
                stream: segment.stream,
            },
            note,
            pool_known: true,
            ..last
        });
    }
    // A pause names the region of its pool.
    if !segment.pool.is_default() {
        trace.regions.insert(segment.pool, "kv".into());
    }
}

#[test]
fn pauses_are_in_both_formats_and_apart_in_pytorchs() {
    let mut with = example();
    with.traces.iter_mut().for_each(paused_and_resumed);
    let mut pickle = pickled(&with);
    let back = read_from(&pickle[..]).unwrap();
    assert_same(&back, &with);
    let back = read_from(&compact(&with)[..]).unwrap();
    assert_same(&back, &with);
    let tag = |trace: &Trace, event: &TraceEvent| {
        let text = trace.stacks.note(event.note).user_metadata;
        text.map(|text| text.raw().to_owned())
    };
    for trace in &back.traces {
        let events = trace.events.iter();
        let pauses = events.filter(|event| event.event.action.is_pause());
        let tags: Vec<_> = pauses.map(|event| tag(trace, event)).collect();
        assert_eq!(tags, [Some("kv".to_owned()), Some("kv".to_owned())]);
    }
    // PyTorch's viewer knows neither these events nor their key.
    let key = pickle.windows(6).position(|text| text == b"pauses");
    pickle[key.unwrap()..][..6].copy_from_slice(b"others");
    let mut without = example();
    for (trace, with) in without.traces.iter_mut().zip(&with.traces) {
        trace.regions.clone_from(&with.regions);
    }
    assert_same(&read_from(&pickle[..]).unwrap(), &without);
}

/// Versions 3 and 4 have fewer kinds of events.
#[test]
fn files_of_versions_3_and_4_are_read() {
    for version in [3_u16, 4] {
        let mut bytes = compact(&example());
        bytes[8..10].copy_from_slice(&version.to_le_bytes());
        assert_same(&read_from(&bytes[..]).unwrap(), &example());
    }
}

#[test]
fn unknown_sections_are_skipped() {
    let mut bytes = compact(&example());
    // An empty section; the checksum of no bytes is 0.
    bytes.splice(10..10, [b'?', 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_same(&read_from(&bytes[..]).unwrap(), &example());
}

#[test]
fn every_truncation_of_a_written_pickle_is_an_error() {
    let bytes = pickled(&example());
    for count in 0..bytes.len() {
        assert!(read_from(&bytes[..count]).unwrap_err().is_truncated());
    }
}

/// Python writes surrogates like this, in file names that are not UTF-8.
#[test]
fn a_surrogate_is_read_as_a_replacement_character() {
    for rest in ["", &"long".repeat(100)] {
        let mut snapshot = example();
        for annotation in &mut snapshot.traces[0].annotations {
            annotation.name = format!("a\u{800}b\u{800}\u{801}{rest}").into();
        }
        let mut bytes = pickled(&snapshot);
        let starts: Vec<usize> = (0..bytes.len())
            .filter(|&index| bytes[index..].starts_with(b"\xe0\xa0"))
            .collect();
        assert!(starts.len() >= 3);
        starts.into_iter().for_each(|start| bytes[start] = 0xed);
        let read = read_from(&bytes[..]).unwrap();
        let expected = format!("a\u{fffd}b\u{fffd}\u{fffd}{rest}");
        assert_eq!(read.traces[0].annotations[0].name.raw(), expected);
    }
}

/// PyTorch writes it like this: Python's -2 takes five bytes, 2^64 - 2 takes eleven.
#[test]
fn a_stream_has_a_sign() {
    let mut snapshot = example();
    let minus_two = Stream(u64::MAX - 1);
    snapshot.traces[0].events[0].event.stream = minus_two;
    let bytes = pickled(&snapshot);
    assert!(bytes.windows(5).any(|bytes| bytes == b"J\xfe\xff\xff\xff"));
    let read = read_from(&bytes[..]).unwrap();
    assert_eq!(read.traces[0].events[0].event.stream, minus_two);
}

#[test]
fn what_an_event_lacks_is_named() {
    let check = |event: &str, expected: &str| {
        let pickle = format!("(dVdevice_traces\n(((d{event}lls.");
        let error = read_from(pickle.as_bytes()).unwrap_err().to_string();
        assert_eq!(error, format!("device 0, event 0: {expected}"));
    };
    check("Vaction\nValloc\nsVaddr\nI1024\ns", "`size` is missing");
    check("Vaction\nValloc\nsVsize\nI1024\ns", "`addr` is missing");
    check(
        "Vaction\nVoom\nsVsize\nI1024\ns",
        "`device_free` is missing",
    );
    check(
        "Vaddr\nI1024\ns",
        "the entry is not a dict with an `action`",
    );
}
