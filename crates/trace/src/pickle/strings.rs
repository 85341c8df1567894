//! A table of strings. Each distinct string is stored once and has a number.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

/// The number of a string in its [`Strings`]. Equal strings have equal numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct StringId(pub(crate) u32);

/// A table of distinct strings, one after the other in one allocation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Strings {
    text: String,
    /// The end of each string in `text`. Each string starts at the end of the one before.
    ends: Vec<usize>,
    by_text: HashTable<u32>,
    /// The most recent look-up: some writers write the same string (`N/A`) again with every event.
    recent: u32,
    hasher: DefaultHashBuilder,
}

impl Strings {
    /// Returns the number of `text`: a new number if the text is new. Constant time.
    #[inline]
    pub(crate) fn intern(&mut self, text: &str) -> StringId {
        let is_recent = !self.ends.is_empty() && self.get(StringId(self.recent)) == text;
        if !is_recent {
            self.recent = self.look_up(text);
        }
        StringId(self.recent)
    }

    fn look_up(&mut self, text: &str) -> u32 {
        let hash = self.hasher.hash_one(text);
        let is_it = |id: &u32| slice(&self.text, &self.ends, *id) == text;
        if let Some(&id) = self.by_text.find(hash, is_it) {
            return id;
        }
        let id =
            u32::try_from(self.ends.len()).expect("the budget of a file ends before 2^32 strings");
        self.text.push_str(text);
        self.ends.push(self.text.len());
        let (hasher, all, ends) = (&self.hasher, &self.text, &self.ends);
        self.by_text
            .insert_unique(hash, id, |&id| hasher.hash_one(slice(all, ends, id)));
        id
    }

    /// Returns the string with number `id`.
    ///
    /// # Panics
    ///
    /// If `id` is from another table.
    pub(crate) fn get(&self, id: StringId) -> &str {
        slice(&self.text, &self.ends, id.0)
    }

    /// Returns the number of strings.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns about how many bytes of memory the table takes.
    pub(crate) fn retained_bytes(&self) -> u64 {
        (self.text.len() + self.ends.len() * 8 + self.by_text.allocation_size()) as u64
    }
}

fn slice<'t>(text: &'t str, ends: &[usize], id: u32) -> &'t str {
    let id = id as usize;
    let start = if id == 0 { 0 } else { ends[id - 1] };
    &text[start..ends[id]]
}
