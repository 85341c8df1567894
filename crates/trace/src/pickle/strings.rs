//! Each distinct string once, by number.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

/// The number of a string in its [`Strings`]: equal strings have equal numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct StringId(pub(crate) u32);

/// A table of distinct strings, one after the other in one allocation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Strings {
    text: String,
    /// Where each string ends in `text`; it starts where the one before ends.
    ends: Vec<usize>,
    by_text: HashTable<u32>,
    /// The string that was looked up last: writers repeat one (`N/A`) with every event, afresh.
    recent: u32,
    hasher: DefaultHashBuilder,
}

impl Strings {
    /// Returns the number of `text`, a new one where it has none yet. Constant time.
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
        let found = self
            .by_text
            .find(hash, |&id| slice(&self.text, &self.ends, id) == text);
        if let Some(&id) = found {
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

    /// Returns the string that `id` numbers.
    ///
    /// # Panics
    ///
    /// If `id` is from another table.
    pub(crate) fn get(&self, id: StringId) -> &str {
        slice(&self.text, &self.ends, id.0)
    }

    /// Returns how many strings there are.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns about how much memory the table takes.
    pub(crate) fn retained_bytes(&self) -> u64 {
        (self.text.len() + self.ends.len() * 8 + self.by_text.allocation_size()) as u64
    }
}

fn slice<'t>(text: &'t str, ends: &[usize], id: u32) -> &'t str {
    let id = id as usize;
    let start = if id == 0 { 0 } else { ends[id - 1] };
    &text[start..ends[id]]
}
