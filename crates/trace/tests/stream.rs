//! Tests of recordings that are written while a job runs, and truncated anywhere. The events in the file read back,
//! with the memory before the first and after the last of them.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail as tests do")]

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use lowtide_core::{
    Action, BlockSnapshot, BlockStatus, Bytes, DeviceAddress, Event, MempoolId, SegmentSnapshot,
    Stream,
};
use lowtide_trace::{
    AllocatorSettings, Frame, NoteId, Snapshot, StackId, StackTable, StreamWriter, TraceEvent,
    read_from, write_compact, write_pickle,
};

const PAGE: u64 = 2 << 20;

/// A file in memory.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Shared {
    fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }
}

/// A simulated device: pages of an expandable segment, and plain segments of one page, each with one block at most.
#[derive(Clone, Default)]
struct Device {
    /// The pages by number: the block in each, with its status. The first eight pages are of an expandable segment.
    pages: BTreeMap<u64, Option<(Bytes, BlockStatus)>>,
}

fn is_expandable(page: u64) -> bool {
    page < 8
}

fn address(page: u64) -> DeviceAddress {
    DeviceAddress(0x7f00_0000_0000 + page * PAGE)
}

impl Device {
    /// Performs the next action on a page, and returns its event.
    fn step(&mut self, page: u64, number: u64) -> Event {
        let mut event = Event {
            action: Action::SegmentAlloc,
            pool: MempoolId(0, u64::from(!is_expandable(page))),
            address: address(page),
            size: Bytes(PAGE),
            stream: Stream(u64::from(!is_expandable(page)) * 0x50),
        };
        let [comes, goes] = if is_expandable(page) {
            [Action::SegmentMap, Action::SegmentUnmap]
        } else {
            [Action::SegmentAlloc, Action::SegmentFree]
        };
        match self.pages.get_mut(&page) {
            None => {
                event.action = comes;
                self.pages.insert(page, None);
            }
            Some(None) if number.is_multiple_of(4) => {
                event.action = goes;
                self.pages.remove(&page);
            }
            Some(block @ None) => {
                (event.action, event.size) = (Action::Alloc, Bytes(1 + number * 77 % (PAGE - 1)));
                *block = Some((event.size, BlockStatus::Allocated));
            }
            Some(Some((size, status @ BlockStatus::Allocated))) => {
                (event.action, event.size) = (Action::FreeRequested, *size);
                *status = BlockStatus::PendingFree;
            }
            Some(block @ Some(_)) => {
                let (size, _) = block.take().unwrap();
                (event.action, event.size) = (Action::FreeCompleted, size);
            }
        }
        event
    }

    /// Returns the segments as in a snapshot: adjacent pages of the expandable segment are one segment.
    fn segments(&self) -> Vec<SegmentSnapshot> {
        let mut segments: Vec<SegmentSnapshot> = Vec::new();
        for (&page, block) in &self.pages {
            let end = address(page) + Bytes(PAGE);
            let mut blocks = Vec::new();
            let mut at = address(page);
            if let &Some((requested, status)) = block {
                let size = requested.round_up(Bytes(512));
                blocks.push(BlockSnapshot {
                    address: at,
                    size,
                    requested,
                    status,
                });
                at = at + size;
            }
            if at < end {
                blocks.push(BlockSnapshot {
                    address: at,
                    size: end.offset_from(at),
                    requested: Bytes::ZERO,
                    status: BlockStatus::Inactive,
                });
            }
            match segments.last_mut() {
                Some(last) if is_expandable(page) && last.address + last.size == address(page) => {
                    last.size += Bytes(PAGE);
                    last.blocks.extend(blocks);
                }
                _ => segments.push(SegmentSnapshot {
                    address: address(page),
                    size: Bytes(PAGE),
                    stream: Stream(u64::from(!is_expandable(page)) * 0x50),
                    pool: MempoolId(0, u64::from(!is_expandable(page))),
                    is_large: false,
                    is_expandable: is_expandable(page),
                    blocks,
                }),
            }
        }
        segments
    }
}

/// Merges adjacent free blocks.
fn joined(segments: &[SegmentSnapshot]) -> Vec<SegmentSnapshot> {
    let mut segments = segments.to_vec();
    for segment in &mut segments {
        let is_free = |block: &BlockSnapshot| block.status == BlockStatus::Inactive;
        segment.blocks.dedup_by(|next, block| {
            let joins = is_free(block) && is_free(next);
            block.size += if joins { next.size } else { Bytes::ZERO };
            joins
        });
    }
    segments
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) % end
    }
}

fn settings() -> AllocatorSettings {
    AllocatorSettings {
        conf: "expandable_segments:True".into(),
        strategy: "caching:expandable_segments:True".into(),
        ..AllocatorSettings::default()
    }
}

/// The events of two devices, and their file with its length after each flush.
struct Recorded {
    before: [Device; 2],
    /// The events with the device's index in [`NUMBERS`]: devices begin in that order, not by number.
    events: Vec<(usize, TraceEvent)>,
    /// The number of events and of bytes at each flush.
    flushed: Vec<(usize, usize)>,
    bytes: Vec<u8>,
    stacks: StackTable,
}

const NUMBERS: [u32; 2] = [3, 1];

fn record(seed: u64, is_finished: bool) -> Recorded {
    let mut random = Random(seed);
    let mut devices = [Device::default(), Device::default()];
    for number in 0..100 {
        devices[0].step(random.below(16), number);
    }
    let before = devices.clone();
    let mut stacks = StackTable::new();
    let file = Shared::default();
    let mut writer = StreamWriter::new(file.clone()).unwrap();
    for (number, device) in NUMBERS.into_iter().zip(&devices) {
        assert!(!writer.has_device(number));
        writer
            .begin_device(number, &settings(), &device.segments(), &[], &stacks)
            .unwrap();
    }
    let (mut events, mut flushed) = (Vec::new(), Vec::new());
    for number in 0..600 {
        let device = usize::from(random.below(4) == 0);
        let stack = match random.below(3) {
            0 => StackId::NONE,
            line => stacks.intern([Frame {
                name: "step".into(),
                filename: "train.py".into(),
                line: u32::try_from(line + number / 200).unwrap(),
            }]),
        };
        let event = TraceEvent {
            event: devices[device].step(random.below(16), number),
            time_us: 1_795_223_068_669_434 + i64::try_from(number).unwrap(),
            stack,
            pool_known: true,
            note: NoteId::NONE,
        };
        writer
            .push(NUMBERS[device], &event, &stacks, &stacks)
            .unwrap();
        events.push((device, event));
        if random.below(40) == 0 {
            writer.flush().unwrap();
            flushed.push((file.bytes().len(), events.len()));
        }
    }
    if is_finished {
        writer.finish().unwrap();
        flushed.push((file.bytes().len(), events.len()));
    }
    Recorded {
        before,
        events,
        flushed,
        bytes: file.bytes(),
        stacks,
    }
}

impl Recorded {
    /// Asserts that a file has the first `count` events and their effects.
    fn check(&self, read: &Snapshot, count: usize) {
        for (index, number) in NUMBERS.into_iter().enumerate() {
            let trace = read
                .traces
                .iter()
                .find(|trace| trace.device == number)
                .unwrap();
            let expected = self.events[..count]
                .iter()
                .filter(|(device, _)| *device == index);
            let expected: Vec<&TraceEvent> = expected.map(|(_, event)| event).collect();
            assert_eq!(trace.events.len(), expected.len());
            for (event, expected) in trace.events.iter().zip(expected) {
                let stack = event.stack;
                assert_eq!(*event, TraceEvent { stack, ..*expected });
                let frames = trace.stacks.frames(stack);
                assert!(frames.eq(self.stacks.frames(expected.stack)));
            }
            assert_eq!(trace.settings, settings());
            let mut device = self.before[index].clone();
            let held = device.segments();
            assert_eq!(trace.initial.segments.len(), held.len());
            let blocks = held.iter().flat_map(|segment| &segment.blocks);
            let in_use = blocks.filter(|block| block.status != BlockStatus::Inactive);
            assert!(
                in_use
                    .map(|block| (block.address, block.size, block.requested))
                    .eq(trace.initial.blocks.iter().map(|block| (
                        block.address,
                        block.size,
                        block.requested
                    )))
            );
            for event in &trace.events {
                device.apply(&event.event);
            }
            assert_eq!(joined(&trace.segments), joined(&device.segments()));
        }
    }
}

impl Device {
    fn apply(&mut self, event: &Event) {
        let page = event.address.offset_from(address(0)).get() / PAGE;
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => drop(self.pages.insert(page, None)),
            Action::SegmentFree | Action::SegmentUnmap => drop(self.pages.remove(&page)),
            Action::Alloc => drop(
                self.pages
                    .insert(page, Some((event.size, BlockStatus::Allocated))),
            ),
            Action::FreeRequested => {
                self.pages
                    .insert(page, Some((event.size, BlockStatus::PendingFree)));
            }
            _ => drop(self.pages.insert(page, None)),
        }
    }
}

#[test]
fn what_is_flushed_reads_back_wherever_the_file_ends() {
    for seed in 1..20 {
        let recorded = record(seed, false);
        assert!(recorded.flushed.len() > 5);
        for &(bytes, count) in &recorded.flushed {
            let read = read_from(&recorded.bytes[..bytes]).unwrap();
            assert!(read.is_cut_off);
            recorded.check(&read, count);
            let longer = &recorded.bytes[..recorded.bytes.len().min(bytes + 7)];
            recorded.check(&read_from(longer).unwrap(), count);
        }
    }
}

#[test]
fn a_file_cut_off_within_a_section_has_those_before_it() {
    let recorded = record(5, true);
    let mut last = 0;
    for length in recorded.flushed[0].0..recorded.bytes.len() {
        let read = read_from(&recorded.bytes[..length]).unwrap();
        let count = read.traces.iter().map(|trace| trace.events.len()).sum();
        assert!(read.is_cut_off && count >= last);
        last = count;
    }
    assert_eq!(last, recorded.events.len());
}

#[test]
fn a_finished_file_says_that_it_is_whole_and_can_be_converted() {
    let recorded = record(99, true);
    let read = read_from(&recorded.bytes[..]).unwrap();
    assert!(!read.is_cut_off);
    recorded.check(&read, recorded.events.len());
    let mut converted = Vec::new();
    write_compact(&read, &mut converted).unwrap();
    let again = read_from(&converted[..]).unwrap();
    for (trace, same) in read.traces.iter().zip(&again.traces) {
        assert_eq!(trace.events.len(), same.events.len());
        assert_eq!(trace.segments, same.segments);
        assert_eq!(trace.settings, same.settings);
        assert_eq!(trace.peak_live_bytes(), same.peak_live_bytes());
    }
}

#[test]
fn events_that_contradict_what_was_there_are_refused() {
    let file = Shared::default();
    let mut writer = StreamWriter::new(file.clone()).unwrap();
    writer
        .begin_device(0, &settings(), &[], &[], &StackTable::new())
        .unwrap();
    let event = Event {
        action: Action::FreeCompleted,
        pool: MempoolId::DEFAULT,
        address: address(0),
        size: Bytes(512),
        stream: Stream::DEFAULT,
    };
    let event = TraceEvent {
        event,
        time_us: 1,
        stack: StackId::NONE,
        pool_known: true,
        note: NoteId::NONE,
    };
    writer
        .push(0, &event, &StackTable::new(), &StackTable::new())
        .unwrap();
    writer.finish().unwrap();
    let error = read_from(&file.bytes()[..]).unwrap_err().to_string();
    assert!(error.contains("where there is no such thing"), "{error}");
}

/// Returns the file of a job that starts with no memory and has these events, by address and size.
fn file_of(settings: &AllocatorSettings, events: &[(Action, u64, u64)]) -> Vec<u8> {
    let (file, stacks) = (Shared::default(), StackTable::new());
    let mut writer = StreamWriter::new(file.clone()).unwrap();
    writer.begin_device(0, settings, &[], &[], &stacks).unwrap();
    for (time_us, &(action, offset, size)) in (0..).zip(events) {
        let event = TraceEvent {
            event: Event {
                action,
                pool: MempoolId::DEFAULT,
                address: DeviceAddress(0x7f00_0000_0000 + offset),
                size: Bytes(size),
                stream: Stream::DEFAULT,
            },
            time_us,
            stack: StackId::NONE,
            pool_known: true,
            note: NoteId::NONE,
        };
        writer.push(0, &event, &stacks, &stacks).unwrap();
    }
    writer.finish().unwrap();
    file.bytes()
}

/// A recording that is written while the job runs has no other moment than that of its events.
#[test]
fn a_free_of_another_size_than_was_allocated_is_refused() {
    let file = file_of(
        &AllocatorSettings::default(),
        &[
            (Action::SegmentAlloc, 0, PAGE),
            (Action::Alloc, 0, 1000),
            (Action::FreeRequested, 0, 512),
        ],
    );
    let error = read_from(&file[..]).unwrap_err();
    assert!(error.is_contradiction());
    assert_eq!(
        error.to_string(),
        "device 0, event 2: free_requested of 512 bytes at 0x7f0000000000, which other events contradict"
    );
}

/// A block of 1000 bytes has 1024 elsewhere.
#[test]
fn a_block_may_fill_a_segment_that_is_no_multiple_of_512_bytes() {
    let events = [
        (Action::SegmentAlloc, 0, 1000),
        (Action::SegmentAlloc, 1000, PAGE),
        (Action::Alloc, 0, 1000),
        (Action::FreeRequested, 0, 1000),
        (Action::FreeCompleted, 0, 1000),
    ];
    let file = file_of(&AllocatorSettings::default(), &events);
    let snapshot = read_from(&file[..]).unwrap();
    let end = snapshot.traces[0].last_events(2).unwrap();
    let [block] = end.initial.blocks[..] else {
        panic!("one block is freed: {:?}", end.initial.blocks);
    };
    assert_eq!((block.size, block.requested), (Bytes(1000), Bytes(1000)));
}

#[test]
fn a_block_of_no_bytes_is_written_as_one_that_can_be_read() {
    let events = [(Action::SegmentAlloc, 0, PAGE), (Action::Alloc, 0, 0)];
    let snapshot = read_from(&file_of(&AllocatorSettings::default(), &events)[..]).unwrap();
    let mut pickle = Vec::new();
    write_pickle(&snapshot, &mut pickle).unwrap();
    let again = read_from(&pickle[..]).unwrap();
    assert_eq!(again.traces[0].segments, snapshot.traces[0].segments);
}

#[test]
fn more_settings_than_a_recording_has_are_refused() {
    let settings = |count| AllocatorSettings {
        roundup_power2_divisions: vec![(1, 4); count],
        ..AllocatorSettings::default()
    };
    let read = |count| read_from(&file_of(&settings(count), &[])[..]);
    assert!(read(64).is_ok());
    let error = read(65).unwrap_err().to_string();
    assert!(
        error.contains("more than 64 `roundup_power2_divisions`"),
        "{error}"
    );
}
