//! Writes lowtide's own format.

use std::io::{self, BufWriter, Write};

use flate2::Crc;
use hashbrown::HashMap;
use lowtide_core::{BlockSnapshot, BlockStatus, FreeBlockOrder, MempoolId, SegmentSnapshot};

use super::payload::PutPayload;
use super::{
    BEFORE_FIRST, MAGIC, SECTION_BYTES_MAX, VERSION, event_flags, section, segment_flags,
    settings_flags,
};
use crate::block_stacks::final_block_stacks;
use crate::error::TraceError;
use crate::model::{AllocatorSettings, AnnotationStage, Snapshot, Trace, TraceEvent};
use crate::notes::NoteId;
use crate::stacks::{Frame, StackId, StackTable};
use crate::text::RecordedText;
use crate::writable::check_writable;

/// The items in a section. A reader holds one section at a time, and a damaged section is lost whole.
const ITEMS_PER_SECTION: usize = 4096;

/// The length at which a section ends that can end anywhere: strings, frames, stacks and notes, and segments.
const LONG_SECTION_BYTES: usize = 1 << 20;

/// Writes `snapshot` in lowtide's own format: about a tenth of the pickle's size before compression.
///
/// The file reads back as the same traces, except that [`Trace::missed_events`] is 0: the written segments are
/// those at the last event.
///
/// # Errors
///
/// If `out` cannot be written, or if `snapshot` has contents that could not be read back.
pub fn write_compact(snapshot: &Snapshot, out: impl Write) -> Result<(), TraceError> {
    check_writable(snapshot)?;
    let mut writer = CompactWriter::new(out)?;
    for trace in &snapshot.traces {
        writer.trace(trace)?;
    }
    for trace in &snapshot.host {
        writer.host(trace)?;
    }
    let mut end = Vec::new();
    for trace in &snapshot.traces {
        end.put_natural(trace.skipped_events);
    }
    writer.section(section::END, &end)?;
    writer.flush()?;
    Ok(())
}

/// Writes sections.
pub(super) struct CompactWriter<W: Write> {
    out: BufWriter<W>,
    pub(super) tables: Tables,
}

/// The strings, frames, stacks and notes written so far.
#[derive(Default)]
pub(super) struct Tables {
    strings: HashMap<Box<str>, u64>,
    /// The function and the file of each frame, as strings, and the line.
    frames: HashMap<[u64; 3], u64>,
    stacks: HashMap<Box<[u64]>, u64>,
    notes: HashMap<[u64; 2], u64>,
    new_strings: Vec<u8>,
    new_frames: Vec<u8>,
    new_stacks: Vec<u8>,
    new_notes: Vec<u8>,
    /// The numbers in the file of the current table's stacks and notes.
    numbers: HashMap<StackId, u64>,
    note_numbers: HashMap<NoteId, u64>,
}

impl<W: Write> CompactWriter<W> {
    /// Starts a file.
    pub(super) fn new(out: W) -> io::Result<CompactWriter<W>> {
        let mut out = BufWriter::new(out);
        out.write_all(MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        let tables = Tables::default();
        Ok(CompactWriter { out, tables })
    }

    fn trace(&mut self, trace: &Trace) -> io::Result<()> {
        self.tables.numbers.clear();
        self.tables.note_numbers.clear();
        self.device(trace.device)?;
        self.settings(&trace.settings)?;
        self.events(section::PAUSED_BEFORE, &trace.initial.paused, &trace.stacks)?;
        self.events(section::EVENTS, &trace.events, &trace.stacks)?;
        for annotations in trace.annotations.chunks(ITEMS_PER_SECTION) {
            let mut payload = Vec::new();
            for annotation in annotations {
                payload.put_natural(self.tables.string(annotation.name.raw()));
                payload.push(match annotation.stage {
                    AnnotationStage::Start => 0,
                    AnnotationStage::End => 1,
                });
                payload.put_integer(annotation.time_us);
                self.write_long_tables()?;
            }
            self.tables(section::ANNOTATIONS, &payload)?;
        }
        self.regions(&trace.regions)?;
        self.final_segments(section::SEGMENTS, trace)
    }

    fn host(&mut self, trace: &Trace) -> io::Result<()> {
        self.tables.numbers.clear();
        self.tables.note_numbers.clear();
        self.events(section::HOST_EVENTS, &trace.events, &trace.stacks)?;
        self.final_segments(section::HOST_SEGMENTS, trace)
    }

    /// Writes the segments at the end of `trace` in sections of this kind.
    fn final_segments(&mut self, kind: u8, trace: &Trace) -> io::Result<()> {
        let stacks = final_block_stacks(trace);
        let mut payload = Vec::new();
        for segment in &trace.segments {
            let stack_of = |tables: &mut Tables, block: &BlockSnapshot| {
                tables.stack(&trace.stacks, stacks.stack(block))
            };
            payload.extend(self.segments(std::slice::from_ref(segment), stack_of));
            self.write_long_tables()?;
            if payload.len() > LONG_SECTION_BYTES {
                self.tables(kind, &payload)?;
                payload.clear();
            }
        }
        self.tables(kind, &payload)
    }

    /// Writes events in as many sections of this kind as they need. Their stacks and notes are in `table`.
    pub(super) fn events(
        &mut self,
        kind: u8,
        events: &[TraceEvent],
        table: &StackTable,
    ) -> io::Result<()> {
        for events in events.chunks(ITEMS_PER_SECTION) {
            let mut payload = Vec::new();
            let mut before = BEFORE_FIRST;
            for event in events {
                let stack = self.tables.stack(table, event.stack);
                let note = if event.note == before.note {
                    0
                } else {
                    self.tables.note(table, event.note)
                };
                put_event(&mut payload, event, &before, [stack, note]);
                before = *event;
                self.write_long_tables()?;
            }
            self.tables(kind, &payload)?;
        }
        Ok(())
    }

    /// Writes the tags of the pools that hold the memory of regions.
    pub(super) fn regions<'t>(
        &mut self,
        regions: impl IntoIterator<Item = (&'t MempoolId, &'t RecordedText)>,
    ) -> io::Result<()> {
        let mut payload = Vec::new();
        for (pool, tag) in regions {
            payload.put_naturals(&[pool.0, pool.1, self.tables.string(tag.raw())]);
            self.write_long_tables()?;
        }
        self.tables(section::REGIONS, &payload)
    }

    /// Writes the device that the next sections are about.
    pub(super) fn device(&mut self, device: u32) -> io::Result<()> {
        let mut payload = Vec::new();
        payload.put_natural(u64::from(device));
        self.section(section::DEVICE, &payload)
    }

    pub(super) fn settings(&mut self, of: &AllocatorSettings) -> io::Result<()> {
        self.section(section::SETTINGS, &settings(of))?;
        if of.strategy.is_empty() {
            return Ok(());
        }
        let mut payload = Vec::new();
        payload.put_text(of.strategy.raw());
        self.section(section::STRATEGY, &payload)
    }

    /// Returns the payload of `segments`. `stack` returns the number of the stack that allocated a block.
    pub(super) fn segments(
        &mut self,
        segments: &[SegmentSnapshot],
        stack: impl Fn(&mut Tables, &BlockSnapshot) -> u64,
    ) -> Vec<u8> {
        let mut payload = Vec::new();
        for segment in segments {
            payload.put_naturals(&[segment.address.get(), segment.size.get()]);
            payload.put_naturals(&[segment.stream.0, segment.pool.0, segment.pool.1]);
            payload.push(
                flag(segment.is_large, segment_flags::LARGE)
                    | flag(segment.is_expandable, segment_flags::EXPANDABLE),
            );
            payload.put_natural(segment.blocks.len() as u64);
            for block in &segment.blocks {
                payload.put_naturals(&[block.size.get(), block.requested.get()]);
                payload.push(match block.status {
                    BlockStatus::Allocated => 0,
                    BlockStatus::PendingFree => 1,
                    BlockStatus::Inactive => 2,
                });
                payload.put_natural(stack(&mut self.tables, block));
            }
        }
        payload
    }

    /// Writes the new strings, frames, stacks and notes if one of their sections is long.
    pub(super) fn write_long_tables(&mut self) -> io::Result<()> {
        let Tables {
            new_strings,
            new_frames,
            new_stacks,
            new_notes,
            ..
        } = &self.tables;
        let tables = [new_strings, new_frames, new_stacks, new_notes];
        if tables.iter().any(|table| table.len() > LONG_SECTION_BYTES) {
            self.tables(section::EVENTS, &[])
        } else {
            Ok(())
        }
    }

    /// Writes a section, and before it the sections of the strings, frames, stacks and notes that it uses for the
    /// first time.
    pub(super) fn tables(&mut self, kind: u8, payload: &[u8]) -> io::Result<()> {
        let strings = std::mem::take(&mut self.tables.new_strings);
        let frames = std::mem::take(&mut self.tables.new_frames);
        let stacks = std::mem::take(&mut self.tables.new_stacks);
        let notes = std::mem::take(&mut self.tables.new_notes);
        let mut sections = [
            (section::STRINGS, &strings[..]),
            (section::FRAMES, &frames),
            (section::STACKS, &stacks),
            (section::NOTES, &notes),
            (kind, payload),
        ]
        .into_iter();
        sections.try_for_each(|(kind, payload)| match payload {
            [] => Ok(()),
            _ => self.section(kind, payload),
        })
    }

    pub(super) fn section(&mut self, kind: u8, payload: &[u8]) -> io::Result<()> {
        let count = u32::try_from(payload.len()).ok();
        let count = count.filter(|&count| u64::from(count) <= SECTION_BYTES_MAX);
        let count = count.ok_or_else(|| {
            let what = format!("a section of {} bytes is too long", payload.len());
            io::Error::new(io::ErrorKind::InvalidInput, what)
        })?;
        let mut crc = Crc::new();
        crc.update(payload);
        self.out.write_all(&[kind])?;
        self.out.write_all(&count.to_le_bytes())?;
        self.out.write_all(payload)?;
        self.out.write_all(&crc.sum().to_le_bytes())
    }

    /// Writes all buffered bytes to the file.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Tables {
    /// Returns the number of a string in the file: a new number if the string is new.
    fn string(&mut self, text: &str) -> u64 {
        if let Some(&number) = self.strings.get(text) {
            return number;
        }
        let number = self.strings.len() as u64;
        self.strings.insert(text.into(), number);
        self.new_strings.put_text(text);
        number
    }

    /// Returns the number of a stack in the file: a new number if the stack is new.
    pub(super) fn stack(&mut self, table: &StackTable, stack: StackId) -> u64 {
        if stack == StackId::NONE {
            return 0;
        }
        if let Some(&number) = self.numbers.get(&stack) {
            return number;
        }
        let frames = table.frames(stack).map(|frame| self.frame(frame));
        let frames: Box<[u64]> = frames.collect();
        let next = self.stacks.len() as u64 + 1;
        let number = self.stacks.get(&frames).copied().unwrap_or(next);
        if number == next {
            self.new_stacks.put_natural(frames.len() as u64);
            self.new_stacks.put_naturals(&frames);
            self.stacks.insert(frames, number);
        }
        self.numbers.insert(stack, number);
        number
    }

    fn frame(&mut self, frame: Frame<'_>) -> u64 {
        let [name, filename] = [frame.name, frame.filename].map(|text| self.string(text.raw()));
        let frame = [name, filename, u64::from(frame.line)];
        let next = self.frames.len() as u64;
        let number = *self.frames.entry(frame).or_insert(next);
        if number == next {
            self.new_frames.put_naturals(&frame);
        }
        number
    }

    /// Returns the number of a note in the file: a new number if the note is new.
    pub(super) fn note(&mut self, table: &StackTable, note: NoteId) -> u64 {
        if note == NoteId::NONE {
            return 0;
        }
        if let Some(&number) = self.note_numbers.get(&note) {
            return number;
        }
        let texts = table.note(note);
        let texts = [texts.compile_context, texts.user_metadata]
            .map(|text| text.map_or(0, |text| self.string(text.raw()) + 1));
        let next = self.notes.len() as u64 + 1;
        let number = *self.notes.entry(texts).or_insert(next);
        if number == next {
            self.new_notes.put_naturals(&texts);
        }
        self.note_numbers.insert(note, number);
        number
    }
}

/// Returns the bits of an order in the settings' first byte.
fn free_block_order(order: Option<FreeBlockOrder>) -> u8 {
    let bits = order.map_or(0, |order| order as u8 + 1);
    bits << settings_flags::FREE_BLOCK_ORDER_SHIFT
}

fn settings(settings: &AllocatorSettings) -> Vec<u8> {
    let mut payload = Vec::new();
    payload.put_text(settings.conf.raw());
    let (max_split_size, expandable) = (settings.max_split_size, settings.expandable_segments);
    let threshold = settings.garbage_collection_threshold;
    let threshold_flag = settings_flags::GARBAGE_COLLECTION_THRESHOLD;
    payload.push(
        flag(max_split_size.is_some(), settings_flags::MAX_SPLIT_SIZE)
            | flag(threshold.is_some(), threshold_flag)
            | flag(expandable.is_some(), settings_flags::EXPANDABLE_SEGMENTS)
            | free_block_order(settings.free_block_order),
    );
    // A limit of 2^64 - 1 bytes is no limit.
    let max_split_size = max_split_size.flatten();
    payload.put_natural(max_split_size.map_or(0, |size| size.get().wrapping_add(1)));
    payload.extend_from_slice(&threshold.unwrap_or(0.0).to_le_bytes());
    payload.push(u8::from(expandable == Some(true)));
    for &(mebibytes, steps) in &settings.roundup_power2_divisions {
        payload.put_naturals(&[mebibytes, steps]);
    }
    payload
}

/// Returns `flag` if it is set, else 0.
fn flag(is_set: bool, flag: u8) -> u8 {
    if is_set { flag } else { 0 }
}

/// Appends `event` to the payload. `stack` and `note` are the numbers in the file of its stack and note, if they
/// differ from those of the event before.
pub(super) fn put_event(
    payload: &mut Vec<u8>,
    event: &TraceEvent,
    before: &TraceEvent,
    [stack, note]: [u64; 2],
) {
    let (now, then) = (&event.event, &before.event);
    let same_place = now.address == then.address && now.size == then.size;
    let same_stream = now.stream == then.stream && event.pool() == before.pool();
    let same_stack = event.stack == before.stack;
    let same_note = event.note == before.note;
    payload.push(
        now.action as u8
            | flag(same_place, event_flags::SAME_PLACE)
            | flag(same_stream, event_flags::SAME_STREAM)
            | flag(same_stack, event_flags::SAME_STACK)
            | flag(!same_note, event_flags::OTHER_NOTE),
    );
    if !same_place {
        let distance = now.address.get().wrapping_sub(then.address.get());
        payload.put_integer(distance.cast_signed());
        payload.put_natural(now.size.get());
    }
    if !same_stream {
        payload.put_natural(now.stream.0);
        payload.push(u8::from(event.pool_known));
        if let Some(pool) = event.pool() {
            payload.put_naturals(&[pool.0, pool.1]);
        }
    }
    if !same_stack {
        payload.put_natural(stack);
    }
    if !same_note {
        payload.put_natural(note);
    }
    payload.put_integer(event.time_us.wrapping_sub(before.time_us));
}
