//! Small numbers for values that repeat.

use std::hash::Hash;

use hashbrown::HashMap;

/// The distinct values of a recording, numbered in order of first appearance.
#[derive(Clone, Debug)]
pub(crate) struct Numbering<T> {
    values: Vec<T>,
    numbers: HashMap<T, u32>,
    /// The most recent look-up: usually the next one is the same.
    recent: Option<(T, u32)>,
}

impl<T> Default for Numbering<T> {
    fn default() -> Numbering<T> {
        Numbering {
            values: Vec::new(),
            numbers: HashMap::new(),
            recent: None,
        }
    }
}

impl<T: Clone + Eq + Hash> Numbering<T> {
    /// Returns the number of `value`: a new number if the value is new.
    pub(crate) fn number(&mut self, value: T) -> u32 {
        match &self.recent {
            Some((recent, number)) if *recent == value => *number,
            _ => {
                let next = u32::try_from(self.values.len()).expect("fewer values than events");
                let number = *self.numbers.entry(value.clone()).or_insert(next);
                if number == next {
                    self.values.push(value.clone());
                }
                self.recent = Some((value, number));
                number
            }
        }
    }

    /// Returns the values in the order of their numbers.
    pub(crate) fn values(&self) -> &[T] {
        &self.values
    }

    /// Like [`Numbering::values`], without the look-up table.
    pub(crate) fn into_values(self) -> Vec<T> {
        self.values
    }
}
