//! Reads lowtide's own format.

use std::mem;
use std::sync::Arc;

use flate2::Crc;
use lowtide_core::{
    Action, BlockSnapshot, BlockStatus, Bytes, DeviceAddress, FreeBlockOrder, MempoolId,
    SegmentSnapshot, Stream,
};

use super::payload::Payload;
use super::{
    BEFORE_FIRST, MAGIC, SECTION_BYTES_MAX, VERSION, event_flags, section, segment_flags,
    settings_flags,
};
use crate::block_stacks::BlockStacks;
use crate::budget::{Budget, Density};
use crate::error::{ErrorKind, Result, TraceError};
use crate::model::{
    AllocatorSettings, Annotation, AnnotationStage, DIVISIONS_MAX, Snapshot, TraceEvent,
};
use crate::notes::{NoteId, NoteRecord, too_many_notes};
use crate::parts::{DEVICES_MAX, Parts};
use crate::pickle::StringId;
use crate::source::Input;
use crate::stacks::{FrameId, FrameRecord, StackId, StackTable};
use crate::text::RecordedText;

/// About how many bytes a string, a frame and a block take, each with its number and its place in a hash table.
const STRING_BYTES: u64 = 24;
const FRAME_BYTES: u64 = 48;
const BLOCK_BYTES: u64 = size_of::<BlockSnapshot>() as u64 + 20;

/// Returns whether the file in `input` has this format. Nothing of it may have been taken. A text file may begin
/// with the same line, but has no such version. A file that ends before the version does not have this format.
pub(crate) fn is_compact(input: &mut Input<'_>) -> Result<bool> {
    const VERSION_LEN: usize = size_of::<u16>();
    let start = input.peek(MAGIC.len() + VERSION_LEN)?;
    let version = start
        .strip_prefix(MAGIC)
        .and_then(|rest| rest.first_chunk());
    let version = version.map(|&bytes: &[u8; VERSION_LEN]| u16::from_le_bytes(bytes));
    Ok(version.is_some_and(|version| (1..=u16::from(u8::MAX)).contains(&version)))
}

/// Returns the recording in `input`.
pub(crate) fn read(input: &mut Input<'_>) -> Result<Snapshot> {
    input.array::<{ MAGIC.len() }>()?;
    let version = u16::from_le_bytes(input.array()?);
    if !(1..=VERSION).contains(&version) {
        let what = format!(
            "version {version} of lowtide's format; this lowtide reads up to {VERSION}, update it"
        );
        return Err(TraceError::new(ErrorKind::Version, what));
    }
    let mut reader = Reader {
        version,
        ..Reader::default()
    };
    loop {
        let start = input.offset();
        match next_section(input) {
            Ok((section::END, payload)) => {
                let mut payload = Payload {
                    rest: &payload,
                    budget: &mut Budget::new(0),
                };
                for (_, parts) in &mut reader.devices {
                    parts.skipped_events =
                        payload.natural().map_err(|error| error.at_byte(start))?;
                }
                return reader.finish(input, false);
            }
            Ok((kind, payload)) => {
                reader
                    .budget(input)
                    .and_then(|mut budget| reader.section(kind, &payload, &mut budget))
                    .map_err(|error| error.at_byte(start))?;
            }
            // The recorder was killed. The sections before this one are complete.
            Err(error) if error.is_truncated() => return reader.finish(input, true),
            Err(error) => return Err(error),
        }
    }
}

/// Takes a section. Returns its kind and its payload, after a check of the checksum.
fn next_section(input: &mut Input<'_>) -> Result<(u8, Vec<u8>)> {
    let start = input.offset();
    let kind = input.byte()?;
    let count = u32::from_le_bytes(input.array()?);
    let payload = input.long_bytes(u64::from(count), SECTION_BYTES_MAX)?;
    let mut crc = Crc::new();
    crc.update(&payload);
    if crc.sum() != u32::from_le_bytes(input.array()?) {
        return Err(TraceError::malformed("the checksum of the section is wrong").at_byte(start));
    }
    Ok((kind, payload))
}

/// The parts of a file read so far.
#[derive(Default)]
struct Reader {
    version: u16,
    /// The file's strings, by number, in the table of stacks.
    strings: Vec<StringId>,
    frames: Vec<FrameId>,
    /// The stacks' ids, by number in the file, from 1.
    stack_ids: Vec<StackId>,
    /// The notes' ids, by number in the file, from 1.
    note_ids: Vec<NoteId>,
    stacks: StackTable,
    names: Vec<Option<RecordedText>>,
    /// The devices, in the order of their first sections.
    devices: Vec<(u32, Parts)>,
    /// The device named last, as an index into `devices`.
    current: usize,
    host: Parts,
}

impl Reader {
    fn finish(self, input: &Input<'_>, is_cut_off: bool) -> Result<Snapshot> {
        let mut budget = self.budget(input)?;
        let stacks = Arc::new(self.stacks);
        let mut snapshot = Snapshot {
            is_cut_off,
            ..Snapshot::default()
        };
        let devices = self.devices.into_iter();
        for (device, parts) in devices.filter(|(_, parts)| !parts.are_marks()) {
            let trace = parts.into_trace(device, Arc::clone(&stacks), &mut budget)?;
            snapshot.traces.push(trace);
        }
        snapshot.traces.sort_by_key(|trace| trace.device);
        self.host.into_host(&stacks, &mut budget, &mut snapshot)?;
        Ok(snapshot)
    }

    /// Reads a section, within the memory of `budget`.
    fn section(&mut self, kind: u8, payload: &[u8], budget: &mut Budget) -> Result<()> {
        budget.take(payload.len(), 1)?;
        let payload = &mut Payload {
            rest: payload,
            budget,
        };
        match kind {
            section::STRINGS => self.read_strings(payload)?,
            section::FRAMES => self.read_frames(payload)?,
            section::STACKS => self.read_stacks(payload)?,
            section::NOTES => self.read_notes(payload)?,
            section::DEVICE => self.read_device(payload)?,
            section::SETTINGS => self.parts()?.settings = settings(payload, self.version)?,
            section::STRATEGY => self.parts()?.settings.strategy = payload.text()?.into(),
            section::EVENTS => {
                let events = mem::take(&mut self.parts()?.events);
                self.parts()?.events = self.read_events(payload, events)?;
            }
            section::PAUSED_BEFORE => {
                let paused = mem::take(&mut self.parts()?.paused_before);
                let paused = self.read_events(payload, paused)?;
                if { paused.iter() }.any(|event| event.event.action != Action::SegmentPaused) {
                    let what = "what was paused before the first event is not only that";
                    return Err(TraceError::malformed(what));
                }
                self.parts()?.paused_before = paused;
            }
            section::REGIONS => self.read_regions(payload)?,
            section::ANNOTATIONS => self.read_annotations(payload)?,
            section::HELD_BEFORE => {
                let held = self.read_device_segments(payload)?;
                self.parts()?.begin_with(held);
            }
            section::SEGMENTS => {
                let held = self.read_device_segments(payload)?;
                self.parts()?.push_segments(held);
            }
            section::HOST_EVENTS => {
                let events = mem::take(&mut self.host.events);
                self.host.events = self.read_events(payload, events)?;
            }
            section::HOST_SEGMENTS => {
                let mut host = mem::take(&mut self.host);
                let held = self.read_segments(payload, &mut host.block_stacks)?;
                host.push_segments(held);
                self.host = host;
            }
            // A later version may add sections that this version can ignore.
            _ => {}
        }
        Ok(())
    }

    fn read_strings(&mut self, payload: &mut Payload<'_, '_>) -> Result<()> {
        while !payload.is_empty() {
            let text = payload.text()?;
            payload.budget.take(1, STRING_BYTES + text.len() as u64)?;
            self.strings.push(self.stacks.strings.intern(text));
        }
        Ok(())
    }

    fn read_frames(&mut self, payload: &mut Payload<'_, '_>) -> Result<()> {
        while !payload.is_empty() {
            payload.budget.take(1, FRAME_BYTES)?;
            let name = payload.number(self.strings.len(), "string")?;
            let filename = payload.number(self.strings.len(), "string")?;
            let frame = FrameRecord {
                name: self.strings[name as usize],
                filename: self.strings[filename as usize],
                line: payload.number(usize::MAX, "line")?,
            };
            self.frames.push(self.stacks.intern_frame(frame));
        }
        Ok(())
    }

    fn read_stacks(&mut self, payload: &mut Payload<'_, '_>) -> Result<()> {
        let mut frames = Vec::new();
        while !payload.is_empty() {
            frames.clear();
            payload.budget.take(1, STRING_BYTES)?;
            for _ in 0..payload.natural()? {
                let number = payload.number(self.frames.len(), "frame")?;
                frames.push(self.frames[number as usize]);
                payload.budget.take(1, size_of::<FrameId>() as u64)?;
            }
            self.stack_ids.push(self.stacks.intern_stack(&frames));
        }
        Ok(())
    }

    fn read_notes(&mut self, payload: &mut Payload<'_, '_>) -> Result<()> {
        while !payload.is_empty() {
            payload.budget.take(1, FRAME_BYTES)?;
            let record = NoteRecord {
                compile_context: payload.item(&self.strings, "string")?,
                user_metadata: payload.item(&self.strings, "string")?,
            };
            let note = self.stacks.notes.intern(record);
            self.note_ids.push(note.ok_or_else(too_many_notes)?);
        }
        Ok(())
    }

    fn read_device(&mut self, payload: &mut Payload<'_, '_>) -> Result<()> {
        let device = payload.number(DEVICES_MAX as usize, "device")?;
        let known = self.devices.iter().position(|&(other, _)| other == device);
        if known.is_some() && self.version < 3 {
            let what = format!("device {device} comes twice");
            return Err(TraceError::malformed(what));
        }
        self.current = known.unwrap_or(self.devices.len());
        if known.is_none() {
            self.devices.push((device, Parts::default()));
        }
        Ok(())
    }

    /// Appends the events of a payload to `events`, and returns all.
    fn read_events(
        &self,
        payload: &mut Payload<'_, '_>,
        mut events: Vec<TraceEvent>,
    ) -> Result<Vec<TraceEvent>> {
        let mut before = BEFORE_FIRST;
        while !payload.is_empty() {
            let first = payload.byte()?;
            payload.budget.take(1, size_of::<TraceEvent>() as u64)?;
            let mut event = before;
            event.event.action = *Action::ALL
                .get(usize::from(first & event_flags::ACTION))
                .ok_or_else(|| TraceError::malformed("an event has an unknown action"))?;
            if first & event_flags::SAME_PLACE == 0 {
                let distance = payload.integer()?.cast_unsigned();
                let address = before.event.address.get().wrapping_add(distance);
                event.event.address = DeviceAddress(address);
                event.event.size = Bytes(payload.natural()?);
            }
            if first & event_flags::SAME_STREAM == 0 {
                event.event.stream = Stream(payload.natural()?);
                let pool = match payload.byte()? {
                    0 => None,
                    _ => Some(MempoolId(payload.natural()?, payload.natural()?)),
                };
                event.set_pool(pool);
            }
            if first & event_flags::SAME_STACK == 0 {
                let stack = payload.item(&self.stack_ids, "stack")?;
                event.stack = stack.unwrap_or_default();
            }
            if first & event_flags::OTHER_NOTE != 0 {
                let note = payload.item(&self.note_ids, "note")?;
                event.note = note.unwrap_or_default();
            }
            event.time_us = before.time_us.wrapping_add(payload.integer()?);
            events.push(event);
            before = event;
        }
        Ok(events)
    }

    fn read_regions(&mut self, payload: &mut Payload<'_, '_>) -> Result<()> {
        while !payload.is_empty() {
            // A tree's nodes are at least half full.
            payload
                .budget
                .take(2, size_of::<(MempoolId, RecordedText)>() as u64)?;
            let pool = MempoolId(payload.natural()?, payload.natural()?);
            let tag = self.name(payload)?;
            self.parts()?.regions.insert(pool, tag);
        }
        Ok(())
    }

    fn read_annotations(&mut self, payload: &mut Payload<'_, '_>) -> Result<()> {
        while !payload.is_empty() {
            payload.budget.take(1, size_of::<Annotation>() as u64)?;
            let name = self.name(payload)?;
            let stage = match payload.byte()? {
                0 => AnnotationStage::Start,
                _ => AnnotationStage::End,
            };
            let time_us = payload.integer()?;
            self.parts()?.annotations.push(Annotation {
                name,
                stage,
                time_us,
            });
        }
        Ok(())
    }

    /// Returns a string as a name. Equal names share one text.
    fn name(&mut self, payload: &mut Payload<'_, '_>) -> Result<RecordedText> {
        let number = payload.number(self.strings.len(), "string")? as usize;
        self.names.resize(self.strings.len(), None);
        let text = self.stacks.strings.get(self.strings[number]);
        let name = self.names[number].get_or_insert_with(|| text.into());
        Ok(name.clone())
    }

    fn read_device_segments(
        &mut self,
        payload: &mut Payload<'_, '_>,
    ) -> Result<Vec<SegmentSnapshot>> {
        let mut stacks = mem::take(&mut self.parts()?.block_stacks);
        let held = self.read_segments(payload, &mut stacks)?;
        self.parts()?.block_stacks = stacks;
        Ok(held)
    }

    /// Returns the segments of a payload, and adds the stacks of their blocks to `block_stacks`.
    fn read_segments(
        &self,
        payload: &mut Payload<'_, '_>,
        block_stacks: &mut BlockStacks,
    ) -> Result<Vec<SegmentSnapshot>> {
        let mut segments = Vec::new();
        while !payload.is_empty() {
            payload
                .budget
                .take(1, size_of::<SegmentSnapshot>() as u64)?;
            let mut address = DeviceAddress(payload.natural()?);
            let mut segment = SegmentSnapshot {
                address,
                size: Bytes(payload.natural()?),
                stream: Stream(payload.natural()?),
                pool: MempoolId(payload.natural()?, payload.natural()?),
                is_large: false,
                is_expandable: false,
                blocks: Vec::new(),
            };
            let flags = payload.byte()?;
            segment.is_large = flags & segment_flags::LARGE != 0;
            segment.is_expandable = flags & segment_flags::EXPANDABLE != 0;
            let does_not_tile = || TraceError::malformed("the blocks of a segment do not tile it");
            let end = address.get().checked_add(segment.size.get());
            let end = end.ok_or_else(does_not_tile)?;
            for _ in 0..payload.natural()? {
                payload.budget.take(1, BLOCK_BYTES)?;
                let size = Bytes(payload.natural()?);
                let requested = Bytes(payload.natural()?);
                let status = match payload.byte()? {
                    0 => BlockStatus::Allocated,
                    1 => BlockStatus::PendingFree,
                    _ => BlockStatus::Inactive,
                };
                let stack = payload.item(&self.stack_ids, "stack")?;
                if size.is_zero() || size.get() > end - address.get() {
                    return Err(does_not_tile());
                }
                block_stacks.insert(address, stack.unwrap_or_default());
                segment.blocks.push(BlockSnapshot {
                    address,
                    size,
                    requested,
                    status,
                });
                address = address + size;
            }
            if address.get() != end {
                return Err(does_not_tile());
            }
            segments.push(segment);
        }
        Ok(segments)
    }

    /// Returns the parts of the device named last.
    fn parts(&mut self) -> Result<&mut Parts> {
        match self.devices.get_mut(self.current) {
            Some((_, parts)) => Ok(parts),
            None => Err(TraceError::malformed("the section belongs to no device")),
        }
    }

    /// Returns the memory that the file may still take, after the parts read so far.
    fn budget(&self, input: &Input<'_>) -> Result<Budget> {
        let mut budget = Budget::new(input.retained_bytes_max(Density::Compact));
        let tables = self.strings.len() * size_of::<StringId>()
            + self.frames.len() * size_of::<FrameId>()
            + self.stack_ids.len() * size_of::<StackId>()
            + self.note_ids.len() * size_of::<NoteId>()
            + self.names.len() * size_of::<Option<RecordedText>>();
        budget.take(tables, 1)?;
        budget.take(1, self.stacks.retained_bytes())?;
        budget.take(1, self.stacks.strings.retained_bytes())?;
        for (_, parts) in &self.devices {
            budget.take(1, parts.retained_bytes())?;
        }
        budget.take(1, self.host.retained_bytes())?;
        Ok(budget)
    }
}

/// Returns the order in the bits of `said`, the settings' first byte.
fn free_block_order(said: u8) -> Option<FreeBlockOrder> {
    let bits =
        said >> settings_flags::FREE_BLOCK_ORDER_SHIFT & settings_flags::FREE_BLOCK_ORDER_MASK;
    let place = usize::from(bits).checked_sub(1)?;
    FreeBlockOrder::ALL.get(place).copied()
}

fn settings(payload: &mut Payload<'_, '_>, version: u16) -> Result<AllocatorSettings> {
    let conf = payload.text()?.into();
    // Version 1 does not distinguish a setting that is off from one that is not recorded.
    let said = match version {
        1 => None,
        _ => Some(payload.byte()?),
    };
    let is_said = |flag, is_on| said.map_or(is_on, |said: u8| said & flag != 0);
    let max_split_size = payload.natural()?.checked_sub(1).map(Bytes);
    let mut threshold = [0; 8];
    threshold.copy_from_slice(payload.bytes(8)?);
    let threshold = f64::from_le_bytes(threshold);
    let expandable = payload.byte()? != 0;
    let has_max = is_said(settings_flags::MAX_SPLIT_SIZE, max_split_size.is_some());
    let threshold_flag = settings_flags::GARBAGE_COLLECTION_THRESHOLD;
    let has_threshold = is_said(threshold_flag, threshold > 0.0);
    let has_expandable = is_said(settings_flags::EXPANDABLE_SEGMENTS, expandable);
    let mut settings = AllocatorSettings {
        conf,
        max_split_size: has_max.then_some(max_split_size),
        garbage_collection_threshold: has_threshold.then_some(threshold),
        expandable_segments: has_expandable.then_some(expandable),
        roundup_power2_divisions: Vec::new(),
        free_block_order: said.and_then(free_block_order),
        strategy: RecordedText::default(),
    };
    let divisions = &mut settings.roundup_power2_divisions;
    while !payload.is_empty() {
        if divisions.len() == DIVISIONS_MAX {
            let what = format!("more than {DIVISIONS_MAX} `roundup_power2_divisions`");
            return Err(TraceError::malformed(what));
        }
        divisions.push((payload.natural()?, payload.natural()?));
    }
    divisions.sort_unstable();
    Ok(settings)
}
