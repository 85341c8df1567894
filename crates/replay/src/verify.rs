//! Compares the events of a replay with those that PyTorch recorded.

use lowtide_core::{Action, Event};
use lowtide_trace::TraceEvent;

use crate::outcome::{Difference, Verified};

/// Compares step by step: the events of each step with those recorded during it.
#[derive(Debug)]
pub(crate) struct Comparison<'a> {
    recorded: &'a [TraceEvent],
    /// The first recorded event that has not been compared.
    start: usize,
    /// The replay's events since then.
    replayed: Vec<Event>,
    result: Verified,
}

impl<'a> Comparison<'a> {
    pub(crate) fn new(recorded: &'a [TraceEvent]) -> Comparison<'a> {
        Comparison {
            recorded,
            start: 0,
            replayed: Vec::new(),
            result: Verified::default(),
        }
    }

    /// Adds events of the replay.
    pub(crate) fn add(&mut self, replayed: impl Iterator<Item = Event>) {
        self.replayed.extend(replayed.filter(is_compared));
    }

    /// Compares the events added since the last call with the recorded events up to `end`.
    pub(crate) fn compare(&mut self, end: usize) {
        let recorded: Vec<(usize, Event)> = (self.start..end)
            .map(|index| (index, self.recorded[index].event))
            .filter(|(_, event)| is_compared(event))
            .collect();
        self.compare_addresses(&recorded);
        if self.result.first_difference.is_none() {
            self.result.first_difference = first_difference(recorded, &self.replayed, end);
        }
        self.replayed.clear();
        self.start = end;
    }

    /// Counts the allocation and whether its address is the recorded one. A step has at most one allocation.
    fn compare_addresses(&mut self, recorded: &[(usize, Event)]) {
        let is_allocation = |event: &Event| event.action == Action::Alloc;
        if let Some((_, recorded)) = recorded.iter().find(|(_, event)| is_allocation(event)) {
            let is_same = |event: &Event| is_allocation(event) && event.address == recorded.address;
            self.result.compared += 1;
            self.result.same_address += u64::from(self.replayed.iter().any(is_same));
        }
    }

    /// Returns whether some event so far differs.
    pub(crate) fn has_difference(&self) -> bool {
        self.result.first_difference.is_some()
    }

    pub(crate) fn finish(self) -> Verified {
        self.result
    }
}

/// Returns whether an event is compared. Snapshots, pauses and annotations are not the allocator's doing.
fn is_compared(event: &Event) -> bool {
    !matches!(event.action, Action::Snapshot | Action::Annotate) && !event.action.is_pause()
}

/// Returns the first event that differs. Within a step, blocks that become free and segments that are released come
/// in the order of PyTorch's hash tables, so both sides are sorted.
fn first_difference(
    mut recorded: Vec<(usize, Event)>,
    replayed: &[Event],
    end: usize,
) -> Option<Difference> {
    let mut replayed = replayed.to_vec();
    let recorded_keys = recorded.iter().map(|(_, event)| key(event));
    if recorded_keys.eq(replayed.iter().map(key)) {
        return None;
    }
    recorded.sort_by_key(|(_, event)| key(event));
    replayed.sort_by_key(key);
    let length = recorded.len().max(replayed.len());
    (0..length).find_map(|position| {
        let (recorded, replayed) = (recorded.get(position), replayed.get(position));
        let differs = recorded.map(|(_, event)| key(event)) != replayed.map(key);
        differs.then(|| Difference {
            event: recorded.map_or(end, |&(index, _)| index),
            recorded: recorded.map(|&(_, event)| event),
            replayed: replayed.copied(),
        })
    })
}

/// Returns the compared fields of an event. The pool is left out because older recordings do not have it. The free
/// bytes of an out-of-memory event are left out because they depend on other programs on the card.
fn key(event: &Event) -> (Action, u64, u64, u64) {
    let address = match event.action {
        Action::OutOfMemory => 0,
        _ => event.address.get(),
    };
    (event.action, address, event.size.get(), event.stream.0)
}
