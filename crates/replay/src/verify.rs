//! Comparing what an allocator did with what PyTorch's did.

use lowtide_core::{Action, Event};
use lowtide_trace::TraceEvent;

use crate::outcome::{Difference, Verified};

/// Compares step by step, each step's events with those recorded during it.
#[derive(Debug)]
pub(crate) struct Comparison<'a> {
    recorded: &'a [TraceEvent],
    /// The first recorded event that has not been compared.
    start: usize,
    /// Events since then.
    replayed: Vec<Event>,
    result: Verified,
}

impl<'a> Comparison<'a> {
    pub(crate) fn new(recorded: &'a [TraceEvent]) -> Comparison<'a> {
        let result = Verified {
            compared: 0,
            same_address: 0,
            first_difference: None,
            limit_bytes: None,
            inferred_pools: None,
        };
        Comparison {
            recorded,
            start: 0,
            replayed: Vec::new(),
            result,
        }
    }

    /// Adds what happened.
    pub(crate) fn add(&mut self, replayed: impl Iterator<Item = Event>) {
        self.replayed.extend(replayed.filter(is_compared));
    }

    /// Compares what happened since the last call with the recorded events up to `end`.
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

    /// Counts the allocations, of which a step has at most one.
    fn compare_addresses(&mut self, recorded: &[(usize, Event)]) {
        let allocation = recorded
            .iter()
            .find(|(_, event)| event.action == Action::Alloc);
        if let Some((_, recorded)) = allocation {
            let same = self
                .replayed
                .iter()
                .any(|event| event.action == Action::Alloc && event.address == recorded.address);
            self.result.compared += 1;
            self.result.same_address += u64::from(same);
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

/// What is in a recording for other reasons than what the allocator did.
fn is_compared(event: &Event) -> bool {
    event.action != Action::Snapshot && !event.action.is_pause()
}

/// Returns the first event that differs. Within a step the order is that of PyTorch's hash tables
/// where several blocks become free or several segments go back, so both sides are put in order.
fn first_difference(
    mut recorded: Vec<(usize, Event)>,
    replayed: &[Event],
    end: usize,
) -> Option<Difference> {
    let mut replayed = replayed.to_vec();
    if recorded
        .iter()
        .map(|(_, event)| key(event))
        .eq(replayed.iter().map(key))
    {
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

/// What of an event is compared: not the pool, which older recordings do not say, and not how much
/// was free on the card when memory ran out, which other programs had a part in.
fn key(event: &Event) -> (Action, u64, u64, u64) {
    let address = match event.action {
        Action::OutOfMemory => 0,
        _ => event.address.get(),
    };
    (event.action, address, event.size.get(), event.stream.0)
}
