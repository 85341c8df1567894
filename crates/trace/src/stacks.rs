//! Call stacks and the other texts of a recording, each distinct one stored once.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};

use crate::notes::{Note, NoteId, NoteRecord, Notes};
use crate::pickle::{StringId, Strings};
use crate::text::RecordedStr;

/// The number of a call stack in a [`StackTable`]. Equal stacks have equal numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct StackId(pub(crate) u32);

impl StackId {
    /// The stack without frames: that of an event recorded without a stack.
    pub const NONE: StackId = StackId(0);
}

/// A function on a call stack.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Frame<'t> {
    /// The function's name.
    pub name: RecordedStr<'t>,
    /// The file it is in, as the interpreter or the debug information names it.
    pub filename: RecordedStr<'t>,
    /// The line that was running, from 1; 0 if unknown.
    pub line: u32,
}

/// The number of a frame in its table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct FrameId(pub(crate) u32);

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct FrameRecord {
    pub(crate) name: StringId,
    pub(crate) filename: StringId,
    pub(crate) line: u32,
}

/// The distinct call stacks of a recording, and the distinct notes of its events.
#[derive(Clone, Debug, Default)]
pub struct StackTable {
    pub(crate) strings: Strings,
    pub(crate) notes: Notes,
    frames: Vec<FrameRecord>,
    frame_ids: HashMap<FrameRecord, FrameId>,
    /// The frames of stack 1, of stack 2, …, innermost function first.
    stack_frames: Vec<FrameId>,
    /// The ends of the stacks in `stack_frames`. Each stack starts at the end of the one before.
    ends: Vec<usize>,
    stack_ids: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl StackTable {
    /// Returns a table with only the empty stack.
    pub fn new() -> StackTable {
        StackTable::default()
    }

    /// Returns the number of the stack of `frames`, innermost first: a new number if the stack is new.
    pub fn intern<'f>(&mut self, frames: impl IntoIterator<Item = Frame<'f>>) -> StackId {
        let ids = frames.into_iter().map(|frame| {
            let record = FrameRecord {
                name: self.strings.intern(frame.name.raw()),
                filename: self.strings.intern(frame.filename.raw()),
                line: frame.line,
            };
            self.intern_frame(record)
        });
        let ids: Vec<FrameId> = ids.collect();
        self.intern_stack(&ids)
    }

    /// Returns the frames of a stack, innermost first.
    ///
    /// # Panics
    ///
    /// If `stack` is from another table.
    pub fn frames(&self, stack: StackId) -> impl ExactSizeIterator<Item = Frame<'_>> {
        self.frame_ids(stack).iter().map(|&frame| self.frame(frame))
    }

    /// Returns the number of `note`: a new number if the note is new.
    ///
    /// # Panics
    ///
    /// If the table has 2^24 - 1 other notes.
    pub fn intern_note(&mut self, note: Note<'_>) -> NoteId {
        let strings = &mut self.strings;
        let record = NoteRecord {
            compile_context: note.compile_context.map(|text| strings.intern(text.raw())),
            user_metadata: note.user_metadata.map(|text| strings.intern(text.raw())),
        };
        let id = self.notes.intern(record);
        id.expect("there are fewer than 2^24 notes")
    }

    /// Returns the note with number `note`.
    ///
    /// # Panics
    ///
    /// If `note` is from another table.
    pub fn note(&self, note: NoteId) -> Note<'_> {
        let record = self.notes.get(note);
        let text = |id: StringId| self.strings.get(id).into();
        Note {
            compile_context: record.compile_context.map(text),
            user_metadata: record.user_metadata.map(text),
        }
    }

    /// Returns the number of distinct stacks, without the empty one.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns whether the table has only the empty stack.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    pub(crate) fn frame(&self, frame: FrameId) -> Frame<'_> {
        let record = self.frames[frame.0 as usize];
        Frame {
            name: self.strings.get(record.name).into(),
            filename: self.strings.get(record.filename).into(),
            line: record.line,
        }
    }

    pub(crate) fn frame_ids(&self, stack: StackId) -> &[FrameId] {
        match stack {
            StackId::NONE => &[],
            StackId(number) => slice(&self.stack_frames, &self.ends, number),
        }
    }

    pub(crate) fn intern_frame(&mut self, record: FrameRecord) -> FrameId {
        let next = FrameId(number(self.frames.len()));
        let id = *self.frame_ids.entry(record).or_insert(next);
        if id == next {
            self.frames.push(record);
        }
        id
    }

    pub(crate) fn intern_stack(&mut self, frames: &[FrameId]) -> StackId {
        if frames.is_empty() {
            return StackId::NONE;
        }
        let hash = self.hasher.hash_one(frames);
        let (all, ends, hasher) = (&self.stack_frames, &self.ends, &self.hasher);
        let is_it = |id: &u32| slice(all, ends, *id) == frames;
        if let Some(&id) = self.stack_ids.find(hash, is_it) {
            return StackId(id);
        }
        self.stack_frames.extend_from_slice(frames);
        self.ends.push(self.stack_frames.len());
        let id = number(self.ends.len());
        let (all, ends) = (&self.stack_frames, &self.ends);
        self.stack_ids
            .insert_unique(hash, id, |&id| hasher.hash_one(slice(all, ends, id)));
        StackId(id)
    }

    /// Returns about how many bytes of memory the table takes, without its strings.
    pub(crate) fn retained_bytes(&self) -> u64 {
        let frames =
            self.frames.len() * size_of::<FrameRecord>() + self.frame_ids.allocation_size();
        let stacks = self.stack_frames.len() * size_of::<FrameId>()
            + self.ends.len() * size_of::<usize>()
            + self.stack_ids.allocation_size();
        (frames + stacks + self.notes.retained_bytes()) as u64
    }
}

/// Returns the frames of stack `id`, which is at least 1.
fn slice<'t>(frames: &'t [FrameId], ends: &[usize], id: u32) -> &'t [FrameId] {
    let id = id as usize;
    let start = if id == 1 { 0 } else { ends[id - 2] };
    &frames[start..ends[id - 1]]
}

fn number(position: usize) -> u32 {
    u32::try_from(position).expect("the budget of a file ends before 2^32 frames")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_and_stacks_count() {
        const COUNT: u32 = 10_000;
        let mut table = StackTable::default();
        let text = table.strings.intern("a");
        let before = table.retained_bytes();
        for line in 0..COUNT {
            let frame = table.intern_frame(FrameRecord {
                name: text,
                filename: text,
                line,
            });
            table.intern_stack(&[frame; 20]);
        }
        let indices = table.frame_ids.allocation_size() + table.stack_ids.allocation_size();
        let each = size_of::<FrameRecord>() + 20 * size_of::<FrameId>() + size_of::<usize>();
        let taken = u64::from(COUNT) * each as u64 + indices as u64;
        assert_eq!(table.retained_bytes() - before, taken);
    }
}
