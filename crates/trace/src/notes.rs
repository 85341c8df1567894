//! Texts that a recording attaches to an event. Each distinct pair is stored once.

use hashbrown::HashMap;

use crate::error::{ErrorKind, TraceError};
use crate::pickle::StringId;
use crate::text::RecordedStr;

/// The number of a [`Note`] in its [`StackTable`](crate::StackTable). Equal notes have equal numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct NoteId([u8; 3]);

/// The texts that a recording attaches to an event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Note<'t> {
    /// The compilation (`torch.compile`) in which the event happened; `N/A` is PyTorch's word for none. `None` if
    /// the recording has no such text.
    pub compile_context: Option<RecordedStr<'t>>,
    /// The text that the program set with `torch.cuda.memory._set_memory_metadata`; empty if it set none. `None` if
    /// the recording has no such text, as up to torch 2.9.
    pub user_metadata: Option<RecordedStr<'t>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct NoteRecord {
    pub(crate) compile_context: Option<StringId>,
    pub(crate) user_metadata: Option<StringId>,
}

/// The distinct notes of a recording, without the empty one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Notes {
    records: Vec<NoteRecord>,
    ids: HashMap<NoteRecord, NoteId>,
    /// The most recent look-up: usually all events have the same note.
    recent: (NoteRecord, NoteId),
}

impl NoteId {
    /// The empty note.
    pub const NONE: NoteId = NoteId([0; 3]);

    fn new(number: usize) -> Option<NoteId> {
        match u32::try_from(number).ok()?.to_le_bytes() {
            [a, b, c, 0] => Some(NoteId([a, b, c])),
            _ => None,
        }
    }

    fn index(self) -> Option<usize> {
        let NoteId([a, b, c]) = self;
        (u32::from_le_bytes([a, b, c, 0]) as usize).checked_sub(1)
    }
}

impl Notes {
    /// Returns the number of a note, a new one if it has none yet. Returns `None` if the table has 2^24 - 1 notes.
    #[inline]
    pub(crate) fn intern(&mut self, record: NoteRecord) -> Option<NoteId> {
        if self.recent.0 != record {
            self.recent = (record, self.look_up(record)?);
        }
        Some(self.recent.1)
    }

    fn look_up(&mut self, record: NoteRecord) -> Option<NoteId> {
        if record == NoteRecord::default() {
            return Some(NoteId::NONE);
        }
        if let Some(&id) = self.ids.get(&record) {
            return Some(id);
        }
        let id = NoteId::new(self.records.len() + 1)?;
        self.records.push(record);
        self.ids.insert(record, id);
        Some(id)
    }

    /// Returns the note with number `id`.
    ///
    /// # Panics
    ///
    /// If `id` is from another table.
    pub(crate) fn get(&self, id: NoteId) -> NoteRecord {
        id.index()
            .map_or_else(NoteRecord::default, |index| self.records[index])
    }

    /// Returns about how many bytes of memory the notes take.
    pub(crate) fn retained_bytes(&self) -> usize {
        self.records.len() * size_of::<NoteRecord>() + self.ids.allocation_size()
    }
}

#[cold]
pub(crate) fn too_many_notes() -> TraceError {
    let what = "more than 16 million different `compile_context` and `user_metadata`";
    TraceError::new(ErrorKind::Limit, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_notes_can_be_full() {
        assert_eq!(NoteId::new(1).and_then(NoteId::index), Some(0));
        let last = NoteId::new((1 << 24) - 1);
        assert_eq!(last.and_then(NoteId::index), Some((1 << 24) - 2));
        assert_eq!(NoteId::new(1 << 24), None);
        assert_eq!(NoteId::NONE.index(), None);
    }
}
