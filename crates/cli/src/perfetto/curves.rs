//! The counters of a device: its reserved and allocated bytes over time.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::Result;
use lowtide_history::{Block, Categories, Category, Change, History, Part, pool_text, stream_text};
use lowtide_trace::Trace;

use super::event::Events;
use super::times::Times;

/// The most points of a device's counters, but for a few.
const POINTS_MAX: usize = 20_000;

/// The most keys of a counter. What would be more is one key together.
const KEYS_MAX: usize = 8;

/// The key of a counter that has only one.
const BYTES: &str = "bytes";

/// The index of the reserved bytes among the values of all counters, and that of the paused bytes if there are any.
const RESERVED: usize = 0;
const PAUSED: usize = 1;

/// The counters of a device.
pub(super) struct Curves<'a> {
    history: &'a History,
    changes: Vec<Change>,
    counters: Vec<Counter>,
    /// The allocated bytes, then their groups.
    groups: Vec<Group>,
    /// The number of values of all counters.
    values: usize,
}

/// A counter: some values at each instant.
struct Counter {
    name: &'static str,
    keys: Vec<String>,
    /// The place of its values among those of all counters.
    values: Range<usize>,
}

/// Allocated bytes that are counted by some property of the blocks.
struct Group {
    /// The index of its first value.
    first: usize,
    /// The number of each block's key.
    key_of_block: Vec<u8>,
}

impl<'a> Curves<'a> {
    /// Returns the counters of a device. `categories` are those of its blocks, if they are known.
    pub(super) fn new(
        trace: &Trace,
        history: &'a History,
        categories: Option<&Categories>,
    ) -> Curves<'a> {
        let mut curves = Curves {
            history,
            changes: history.changes(),
            counters: Vec::new(),
            groups: Vec::new(),
            values: 0,
        };
        let bytes = || vec![BYTES.to_owned()];
        curves.add("reserved", bytes());
        if !history.pauses.is_empty() {
            curves.add("paused", bytes());
        }
        curves.group("allocated", bytes(), &[()], |_, _| ());
        if let Some(categories) = categories {
            let of_block = |index: usize, _: &Block| categories.of_block(index);
            let is_used = |category: &Category| {
                (0..history.blocks.len()).any(|index| categories.of_block(index) == *category)
            };
            let used: Vec<Category> = Category::ALL.into_iter().filter(is_used).collect();
            let names = used.iter().map(|used| used.name().replace('_', " "));
            curves.group("category", names.collect(), &used, of_block);
        }
        let streams = history.streams.iter().copied().map(stream_text);
        curves.group_largest("stream", &streams.collect::<Vec<_>>(), |block| block.stream);
        let pools = history.pools.iter();
        let pools = pools.map(|&pool| pool_text(pool, trace.regions.get(&pool)));
        curves.group_largest("pool", &pools.collect::<Vec<_>>(), |block| block.pool);
        curves
    }

    /// Adds a counter. Returns the index of its first value.
    fn add(&mut self, name: &'static str, keys: Vec<String>) -> usize {
        let first = self.values;
        self.values += keys.len();
        self.counters.push(Counter {
            name,
            keys,
            values: first..self.values,
        });
        first
    }

    /// Adds a counter of the allocated bytes by a property of the blocks. `names` are those of `keys`, and one more if
    /// blocks have other keys.
    fn group<K: PartialEq>(
        &mut self,
        name: &'static str,
        names: Vec<String>,
        keys: &[K],
        key_of: impl Fn(usize, &Block) -> K,
    ) {
        let number = |(index, block)| {
            let key = key_of(index, block);
            let number = keys.iter().position(|known| *known == key);
            u8::try_from(number.unwrap_or(keys.len())).expect("a counter has few keys")
        };
        let key_of_block = self.history.blocks.iter().enumerate().map(number).collect();
        let first = self.add(name, names);
        self.groups.push(Group {
            first,
            key_of_block,
        });
    }

    /// Adds a counter of the allocated bytes by stream or pool, if blocks have several. `names` are those of all. Only
    /// the ones with the most bytes are counted apart.
    fn group_largest(
        &mut self,
        name: &'static str,
        names: &[String],
        key_of: impl Fn(&Block) -> u32,
    ) {
        let mut sums: BTreeMap<u32, u64> = BTreeMap::new();
        for block in &self.history.blocks {
            let sum = sums.entry(key_of(block)).or_default();
            *sum = sum.saturating_add(block.live_bytes().get());
        }
        if sums.len() < 2 {
            return;
        }
        let mut largest: Vec<u32> = sums.keys().copied().collect();
        largest.sort_by_key(|key| Reverse(sums[key]));
        let has_others = largest.len() > KEYS_MAX;
        largest.truncate(KEYS_MAX - usize::from(has_others));
        let of_largest = largest.iter().map(|&key| names[key as usize].clone());
        let others = has_others.then(|| "others".to_owned());
        let names = of_largest.chain(others).collect();
        self.group(name, names, &largest, |_, block| key_of(block));
    }

    /// Writes the counters at the instants that [`Curves::kept`] chooses, each if it changed.
    pub(super) fn write(&self, events: &mut Events<'_>, times: &Times) -> Result<()> {
        let mut kept = self.kept().into_iter().peekable();
        let mut written: Option<Vec<u64>> = None;
        let mut walk = Walk::new(self);
        while let Some(instant) = walk.next() {
            if kept.next_if_eq(&instant).is_none() {
                continue;
            }
            for counter in &self.counters {
                let before = written.as_ref().map(|all| &all[counter.values.clone()]);
                let values = &walk.values[counter.values.clone()];
                if before != Some(values) {
                    events.count(counter.name, times.at(instant), &counter.keys, values)?;
                }
            }
            written = Some(walk.values.clone());
        }
        Ok(())
    }

    /// Returns the instants to write, ascending: all that have a change or, if there are more than [`POINTS_MAX`], some
    /// of each part of the recording. These are the instants at which some value is at its maximum, or the allocated
    /// bytes at their minimum, and the last one. So no peak is lost.
    fn kept(&self) -> Vec<u32> {
        let changes = self
            .changes
            .chunk_by(|one, next| one.instant == next.instant);
        let instants = changes.count();
        let parts = POINTS_MAX / (self.values + 2);
        let in_part = if instants > POINTS_MAX {
            instants.div_ceil(parts)
        } else {
            1
        };
        let mut kept = Vec::new();
        let mut part: Option<Extremes> = None;
        let mut walk = Walk::new(self);
        let mut number = 0;
        while let Some(instant) = walk.next() {
            let allocated = walk.values[self.groups[0].first];
            let extremes =
                part.get_or_insert_with(|| Extremes::new(instant, &walk.values, allocated));
            extremes.add(instant, &walk.values, allocated);
            number += 1;
            if number % in_part == 0 || number == instants {
                kept.extend(part.take().into_iter().flat_map(Extremes::instants));
            }
        }
        kept.sort_unstable();
        kept.dedup();
        kept
    }
}

/// A walk over the instants that have a change.
struct Walk<'c> {
    curves: &'c Curves<'c>,
    /// The changes after the current instant.
    changes: &'c [Change],
    /// The values of all counters at the current instant.
    values: Vec<u64>,
}

impl<'c> Walk<'c> {
    fn new(curves: &'c Curves<'c>) -> Walk<'c> {
        Walk {
            curves,
            changes: &curves.changes,
            values: vec![0; curves.values],
        }
    }

    /// Goes to the next instant with a change, and returns it.
    fn next(&mut self) -> Option<u32> {
        let instant = self.changes.first()?.instant;
        while let Some((change, later)) = self.changes.split_first()
            && change.instant == instant
        {
            self.apply(change);
            self.changes = later;
        }
        Some(instant)
    }

    fn apply(&mut self, change: &Change) {
        let history = self.curves.history;
        match change.part {
            Part::Segment(index) => {
                self.add(
                    RESERVED,
                    history.segments[index].size.get(),
                    change.is_there,
                );
            }
            Part::Pause(index) => {
                let bytes = history.pauses[index].size.get();
                self.add(RESERVED, bytes, !change.is_there);
                self.add(PAUSED, bytes, change.is_there);
            }
            Part::Block(index) => {
                let bytes = history.blocks[index].live_bytes().get();
                for group in &self.curves.groups {
                    let value = group.first + usize::from(group.key_of_block[index]);
                    self.add(value, bytes, change.is_there);
                }
            }
        }
    }

    /// Adds bytes to a value, or subtracts them.
    fn add(&mut self, value: usize, bytes: u64, is_more: bool) {
        let value = &mut self.values[value];
        if is_more {
            *value += bytes;
        } else {
            *value -= bytes;
        }
    }
}

/// A value, and the first instant that has it.
type At = (u64, u32);

/// The extremes in a part of the recording.
struct Extremes {
    /// The maximum of each value.
    most: Vec<At>,
    /// The minimum of the allocated bytes.
    least_allocated: At,
    last: u32,
}

impl Extremes {
    fn new(instant: u32, values: &[u64], allocated: u64) -> Extremes {
        Extremes {
            most: values.iter().map(|&value| (value, instant)).collect(),
            least_allocated: (allocated, instant),
            last: instant,
        }
    }

    fn add(&mut self, instant: u32, values: &[u64], allocated: u64) {
        for (most, &value) in self.most.iter_mut().zip(values) {
            if value > most.0 {
                *most = (value, instant);
            }
        }
        if allocated < self.least_allocated.0 {
            self.least_allocated = (allocated, instant);
        }
        self.last = instant;
    }

    fn instants(self) -> impl Iterator<Item = u32> {
        let extremes = self.most.into_iter().chain([self.least_allocated]);
        extremes.map(|(_, instant)| instant).chain([self.last])
    }
}
