//! Replaces the dicts that snapshots have many of by fixed-size records: events, blocks, frames.

use lowtide_core::{Action, BlockStatus, Bytes, DeviceAddress, Event, MempoolId, Stream};

use crate::error::{Result, TraceError};
use crate::model::{AnnotationStage, TraceEvent};
use crate::notes::{NoteId, NoteRecord, too_many_notes};
use crate::pickle::{Dict, Heap, Recogniser, StringId, Strings, Value};
use crate::stacks::{FrameId, FrameRecord, StackId, StackTable};

/// Defines [`Field`] and the keys of its fields.
macro_rules! fields {
    ($($field:ident $key:literal,)*) => {
        /// The keys of the dicts that become records. Their strings are interned first and in this order, so a key's
        /// string has the same number as its field.
        #[derive(Clone, Copy)]
        pub(super) enum Field {
            $($field,)*
        }

        const FIELD_NAMES: [&str; [$(Field::$field),*].len()] = [$($key),*];
    };
}

fields! {
    Action "action",
    Addr "addr",
    Size "size",
    Stream "stream",
    TimeUs "time_us",
    Frames "frames",
    PoolId "pool_id",
    DeviceFree "device_free",
    Address "address",
    RequestedSize "requested_size",
    State "state",
    History "history",
    RealSize "real_size",
    Name "name",
    Filename "filename",
    Line "line",
    Stage "stage",
    Device "device",
    CompileContext "compile_context",
    UserMetadata "user_metadata",
}

/// The record that replaces a dict.
#[derive(Clone, Copy, Debug)]
pub(super) enum Record {
    /// The event of this number.
    Event(u32),
    /// An entry of a trace whose action is not one of [`Action`].
    SkippedEvent,
    /// The block of this number.
    Block(u32),
    Frame(FrameId),
    /// The annotation of this number.
    Annotation(u32),
}

/// A block, as a segment lists it.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockRecord {
    /// Missing in old recordings. Blocks tile their segment, so it can be computed.
    pub(super) address: Option<DeviceAddress>,
    pub(super) size: Bytes,
    pub(super) requested: Bytes,
    pub(super) status: BlockStatus,
    pub(super) stack: StackId,
}

/// A mark in time, as in a snapshot.
#[derive(Clone, Copy, Debug)]
pub(super) struct AnnotationRecord {
    pub(super) name: StringId,
    pub(super) stage: AnnotationStage,
    pub(super) device: u32,
    pub(super) time_us: i64,
}

/// The records of a file.
#[derive(Default)]
pub(super) struct Records {
    pub(super) events: Vec<TraceEvent>,
    pub(super) blocks: Vec<BlockRecord>,
    pub(super) annotations: Vec<AnnotationRecord>,
    pub(super) stacks: StackTable,
    /// The frames of the stack being read. Kept to avoid an allocation per stack.
    frames: Vec<FrameId>,
}

/// Returns the strings whose numbers [`Records`] relies on.
pub(super) fn known_strings() -> Strings {
    let mut strings = Strings::default();
    for name in FIELD_NAMES {
        strings.intern(name);
    }
    for action in Action::ALL {
        strings.intern(action.name());
    }
    strings
}

/// The values of a dict's known keys.
struct Fields([Value; FIELD_NAMES.len()]);

impl Fields {
    const NONE: Fields = Fields([Value::None; FIELD_NAMES.len()]);

    #[inline]
    fn of(items: &[Value]) -> Fields {
        let mut fields = Fields::NONE;
        fields.fill(items);
        fields
    }

    /// Sets the values of `items`, keys and values in turn.
    #[inline]
    fn fill(&mut self, items: &[Value]) {
        for pair in items.chunks_exact(2) {
            if let Value::String(key) = pair[0]
                && let Some(field) = self.0.get_mut(key.0 as usize)
            {
                *field = pair[1];
            }
        }
    }

    #[inline]
    fn get(&self, field: Field) -> Value {
        self.0[field as usize]
    }

    #[inline]
    fn has(&self, field: Field) -> bool {
        self.get(field) != Value::None
    }

    #[inline]
    fn natural(&self, field: Field) -> Result<u64> {
        natural(self.get(field)).ok_or_else(|| {
            let name = FIELD_NAMES[field as usize];
            TraceError::malformed(if self.has(field) {
                format!("`{name}` is not a number from 0 to 2^64")
            } else {
                format!("`{name}` is missing")
            })
        })
    }
}

impl Recogniser for Records {
    type Record = Record;

    #[inline]
    fn recognise(&mut self, heap: &mut Heap<Record>, items: &[Value]) -> Result<Option<Record>> {
        // Filled in place, because it is too large to move for each dict.
        let mut fields = Fields::NONE;
        fields.fill(items);
        if fields.has(Field::Action) && (fields.has(Field::Addr) || fields.has(Field::DeviceFree)) {
            return self.event(heap, &fields).map(Some);
        }
        if fields.has(Field::State) && fields.has(Field::Size) {
            return self.block(heap, &fields).map(Some);
        }
        if fields.has(Field::Stage) {
            return Ok(self.annotation(heap, &fields));
        }
        Ok(self.frame(&fields).map(Record::Frame))
    }

    fn retained_bytes(&self) -> u64 {
        let events = self.events.len() * size_of::<TraceEvent>();
        let blocks = self.blocks.len() * size_of::<BlockRecord>();
        let annotations = self.annotations.len() * size_of::<AnnotationRecord>();
        (events + blocks + annotations) as u64 + self.stacks.retained_bytes()
    }
}

impl Records {
    /// Returns the record of a dict, also of a dict that was built in several steps; `None` if it is no known kind.
    pub(super) fn resolve(
        &mut self,
        heap: &mut Heap<Record>,
        value: Value,
    ) -> Result<Option<Record>> {
        let Value::Dict(dict) = value else {
            return Ok(None);
        };
        match heap.dict(dict) {
            Dict::Record(record) => Ok(Some(record)),
            Dict::Empty => Ok(None),
            Dict::Pairs(_) => {
                heap.kept(value)?;
                let items = heap.pairs(value).to_vec();
                let record = self.recognise(heap, &items)?;
                if let Some(record) = record {
                    heap.set_record(dict, record);
                }
                Ok(record)
            }
        }
    }

    #[inline]
    fn event(&mut self, heap: &mut Heap<Record>, fields: &Fields) -> Result<Record> {
        let Some(action) = action(fields.get(Field::Action)) else {
            return Ok(Record::SkippedEvent);
        };
        let address = match action {
            Action::OutOfMemory if fields.has(Field::DeviceFree) => Field::DeviceFree,
            _ => Field::Addr,
        };
        let pool = match fields.get(Field::PoolId) {
            Value::None => None,
            value => Some(pool_id(heap, value)?),
        };
        let time_us = match fields.get(Field::TimeUs) {
            Value::Int(time_us) => time_us,
            _ => 0,
        };
        let event = TraceEvent {
            event: Event {
                action,
                pool: pool.unwrap_or_default(),
                address: DeviceAddress(fields.natural(address)?),
                size: Bytes(fields.natural(Field::Size)?),
                stream: stream(fields.get(Field::Stream))?,
            },
            time_us,
            stack: self.stack(heap, fields.get(Field::Frames)),
            pool_known: pool.is_some(),
            note: self.note(fields)?,
        };
        let number = number(self.events.len());
        self.events.push(event);
        Ok(Record::Event(number))
    }

    fn block(&mut self, heap: &mut Heap<Record>, fields: &Fields) -> Result<Record> {
        let status = match heap.text(fields.get(Field::State)) {
            Some("active_allocated") => BlockStatus::Allocated,
            // PyTorch's documentation uses the second name.
            Some("active_pending_free" | "active_awaiting_free") => BlockStatus::PendingFree,
            Some("inactive") => BlockStatus::Inactive,
            _ => return Err(TraceError::malformed("a block has an unknown `state`")),
        };
        // Recordings up to torch 2.1 list a block's allocations, newest first.
        let history = heap.items(fields.get(Field::History));
        let history = history.and_then(|history| history.first());
        let holder = history.map(|&holder| Fields::of(heap.pairs(holder)));
        let size = Bytes(fields.natural(Field::Size)?);
        let requested = if fields.has(Field::RequestedSize) {
            Bytes(fields.natural(Field::RequestedSize)?)
        } else if let Some(holder) = &holder
            && holder.has(Field::RealSize)
        {
            Bytes(holder.natural(Field::RealSize)?)
        } else {
            size
        };
        let address = match fields.get(Field::Address) {
            Value::None => None,
            _ => Some(DeviceAddress(fields.natural(Field::Address)?)),
        };
        let frames = match holder {
            Some(holder) if !fields.has(Field::Frames) => holder.get(Field::Frames),
            _ => fields.get(Field::Frames),
        };
        let stack = match status {
            BlockStatus::Inactive => StackId::NONE,
            BlockStatus::Allocated | BlockStatus::PendingFree => self.stack(heap, frames),
        };
        let block = BlockRecord {
            address,
            size,
            requested,
            status,
            stack,
        };
        let number = number(self.blocks.len());
        self.blocks.push(block);
        Ok(Record::Block(number))
    }

    #[inline]
    fn note(&mut self, fields: &Fields) -> Result<NoteId> {
        let text = |field| match fields.get(field) {
            Value::String(text) => Some(text),
            _ => None,
        };
        let record = NoteRecord {
            compile_context: text(Field::CompileContext),
            user_metadata: text(Field::UserMetadata),
        };
        self.stacks.notes.intern(record).ok_or_else(too_many_notes)
    }

    /// Returns the record of a mark in time; `None` if a field is missing.
    fn annotation(&mut self, heap: &Heap<Record>, fields: &Fields) -> Option<Record> {
        let stage = match heap.text(fields.get(Field::Stage)) {
            Some("START") => AnnotationStage::Start,
            Some("END") => AnnotationStage::End,
            _ => return None,
        };
        let Value::String(name) = fields.get(Field::Name) else {
            return None;
        };
        let Value::Int(time_us) = fields.get(Field::TimeUs) else {
            return None;
        };
        let device = small(fields.get(Field::Device))?;
        let number = number(self.annotations.len());
        self.annotations.push(AnnotationRecord {
            name,
            stage,
            device,
            time_us,
        });
        Some(Record::Annotation(number))
    }

    fn frame(&mut self, fields: &Fields) -> Option<FrameId> {
        let Value::String(name) = fields.get(Field::Name) else {
            return None;
        };
        let Value::String(filename) = fields.get(Field::Filename) else {
            return None;
        };
        let line = small(fields.get(Field::Line)).unwrap_or(0);
        Some(self.stacks.intern_frame(FrameRecord {
            name,
            filename,
            line,
        }))
    }

    /// Returns the stack of a list of frames, and seals the list, because many events may share it.
    #[inline]
    fn stack(&mut self, heap: &mut Heap<Record>, list: Value) -> StackId {
        if list == Value::None {
            return StackId::NONE;
        }
        if let Some(stack) = heap.seal(list) {
            return StackId(stack);
        }
        self.new_stack(heap, list)
    }

    fn new_stack(&mut self, heap: &mut Heap<Record>, list: Value) -> StackId {
        let mut frames = std::mem::take(&mut self.frames);
        frames.clear();
        let items = heap.items(list).unwrap_or_default();
        for &item in items {
            let Value::Dict(dict) = item else { continue };
            frames.extend(match heap.dict(dict) {
                Dict::Record(Record::Frame(frame)) => Some(frame),
                Dict::Record(_) | Dict::Empty => None,
                Dict::Pairs(_) => self.frame(&Fields::of(heap.pairs(item))),
            });
        }
        let stack = self.stacks.intern_stack(&frames);
        self.frames = frames;
        // An empty list may serve other purposes, too, and costs nothing to read again.
        if !items.is_empty() {
            heap.seal_list(list, stack.0);
        }
        stack
    }
}

/// Returns `value` if it is an integer from 0 to 2^64 - 1.
pub(super) fn natural(value: Value) -> Option<u64> {
    match value {
        Value::Int(value) => u64::try_from(value).ok(),
        Value::Natural(value) => Some(value),
        _ => None,
    }
}

/// Returns `value` if it is an integer from 0 to 2^32 - 1.
pub(super) fn small(value: Value) -> Option<u32> {
    u32::try_from(natural(value)?).ok()
}

/// Returns the number of the record at `position`.
fn number(position: usize) -> u32 {
    u32::try_from(position).expect("the budget of a file ends before 2^32 records")
}

/// Returns the stream with the handle `value`: a pointer, which some writers write as a signed number.
pub(super) fn stream(value: Value) -> Result<Stream> {
    match value {
        Value::Int(value) => Ok(Stream(value.cast_unsigned())),
        Value::Natural(value) => Ok(Stream(value)),
        Value::None => Ok(Stream::DEFAULT),
        _ => Err(TraceError::malformed("`stream` is not a number")),
    }
}

/// Returns the pool whose id is `value`, a pair of numbers.
pub(super) fn pool_id(heap: &Heap<Record>, value: Value) -> Result<MempoolId> {
    if let Some(&[first, second]) = heap.items(value)
        && let (Some(first), Some(second)) = (natural(first), natural(second))
    {
        return Ok(MempoolId(first, second));
    }
    Err(TraceError::malformed(
        "the identity of a pool is not a pair of numbers",
    ))
}

/// Returns the action whose name is the known string `value`.
pub(super) fn action(value: Value) -> Option<Action> {
    match value {
        Value::String(id) => Action::ALL
            .get((id.0 as usize).checked_sub(FIELD_NAMES.len())?)
            .copied(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::iter::repeat_n;

    use super::*;

    #[test]
    fn every_record_counts() {
        const COUNT: usize = 10_000;
        let mut records = Records::default();
        let before = records.retained_bytes();
        let block = BlockRecord {
            address: None,
            size: Bytes(512),
            requested: Bytes(500),
            status: BlockStatus::Allocated,
            stack: StackId::NONE,
        };
        let event = TraceEvent {
            event: Event {
                action: Action::Alloc,
                pool: MempoolId::DEFAULT,
                address: DeviceAddress(512),
                size: Bytes(512),
                stream: Stream::DEFAULT,
            },
            time_us: 0,
            stack: StackId::NONE,
            pool_known: false,
            note: NoteId::NONE,
        };
        let annotation = AnnotationRecord {
            name: StringId(0),
            stage: AnnotationStage::Start,
            device: 0,
            time_us: 0,
        };
        records.blocks.extend(repeat_n(block, COUNT));
        records.events.extend(repeat_n(event, 2 * COUNT));
        records.annotations.extend(repeat_n(annotation, 3 * COUNT));
        let counted = records.retained_bytes() - before;
        let (events, marks) = (
            2 * size_of::<TraceEvent>(),
            3 * size_of::<AnnotationRecord>(),
        );
        let each = size_of::<BlockRecord>() + events + marks;
        assert_eq!(counted, (COUNT * each) as u64);
        assert!(before < 4096, "{before}");
    }

    #[test]
    fn known_strings_have_the_numbers_of_their_fields_and_actions() {
        let strings = known_strings();
        assert_eq!(strings.get(StringId(Field::Action as u32)), "action");
        assert_eq!(
            strings.get(StringId(Field::DeviceFree as u32)),
            "device_free"
        );
        assert_eq!(
            strings.get(StringId(Field::UserMetadata as u32)),
            "user_metadata"
        );
        for (number, expected) in (FIELD_NAMES.len()..).zip(Action::ALL) {
            let number = u32::try_from(number).unwrap();
            assert_eq!(action(Value::String(StringId(number))), Some(expected));
        }
        assert_eq!(strings.len(), FIELD_NAMES.len() + Action::ALL.len());
    }
}
