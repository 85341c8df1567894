//! Small numbers for values that come again and again.

use std::hash::Hash;

use hashbrown::HashMap;

/// The distinct values of a recording, numbered in the order in which they first came.
#[derive(Clone, Debug)]
pub(crate) struct Numbering<T> {
    values: Vec<T>,
    numbers: HashMap<T, u32>,
    /// What was looked up last: mostly, the next is the same.
    recent: Option<(T, u32)>,
}

impl<T: Copy + Eq + Hash> Numbering<T> {
    pub(crate) fn new() -> Numbering<T> {
        Numbering {
            values: Vec::new(),
            numbers: HashMap::new(),
            recent: None,
        }
    }

    /// Returns the number of `value`, a new one where it has none yet.
    pub(crate) fn number(&mut self, value: T) -> u32 {
        match self.recent {
            Some((recent, number)) if recent == value => number,
            _ => {
                let next = u32::try_from(self.values.len()).expect("fewer values than events");
                let number = *self.numbers.entry(value).or_insert(next);
                if number == next {
                    self.values.push(value);
                }
                self.recent = Some((value, number));
                number
            }
        }
    }

    /// Returns the value that has a number.
    pub(crate) fn get(&self, number: u32) -> T {
        self.values[number as usize]
    }

    /// Returns the values by their numbers.
    pub(crate) fn into_values(self) -> Vec<T> {
        self.values
    }
}
