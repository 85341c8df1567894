//! Regions and their pauses in PyTorch's snapshots. PyTorch's format has neither, so they have keys of their own,
//! which PyTorch's viewer ignores.
//!
//! `region_pools` is a list of dicts. Each has a `device`, a `pool_id` as in events, and the `tag` of the region
//! whose memory that pool holds.
//!
//! `pauses` is a list of dicts with these keys:
//! - `device`,
//! - `event`: like an event of the device's trace, with the region's tag as its `user_metadata`,
//! - `entries_before`: the number of entries of that trace before the pause, or -1 if the memory was paused before
//!   the first. If it is missing, the pause's time decides.

use std::collections::BTreeMap;
use std::mem;

use lowtide_core::{Action, Event, MempoolId};

use crate::model::{Trace, TraceEvent};
use crate::parts::Parts;
use crate::text::RecordedText;

/// A pool that holds the memory of a region.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegionPool {
    /// The device it is on.
    pub device: u32,
    /// The pool.
    pub pool: MempoolId,
    /// The tag of its region.
    pub tag: RecordedText,
}

/// A pause or a resume, and its place among the other events of its device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pause {
    pub(super) place: Place,
    pub(super) event: TraceEvent,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// Before the first event.
    BeforeFirst,
    /// After this number of events.
    After(usize),
    /// At its time.
    ByTime,
}

/// Returns the pauses of a trace. Linear in its events.
pub(super) fn pauses_of(trace: &Trace) -> Vec<Pause> {
    let before = trace.initial.paused.iter().map(|&event| Pause {
        place: Place::BeforeFirst,
        event,
    });
    let mut others = 0;
    let during = trace.events.iter().filter_map(|&event| {
        if !event.event.action.is_pause() {
            others += 1;
            return None;
        }
        let place = Place::After(others);
        Some(Pause { place, event })
    });
    before.chain(during).collect()
}

/// Inserts pauses among the events of `parts`. O(n log m) for n events and m pauses.
pub(super) fn put(pauses: Vec<Pause>, parts: &mut Parts) {
    let mut placed = Vec::with_capacity(pauses.len());
    let mut by_time = Vec::new();
    for Pause { place, event } in pauses {
        match place {
            Place::BeforeFirst if event.event.action == Action::SegmentPaused => {
                parts.paused_before.push(event);
            }
            // Before the first event, all memory that is not listed as paused is mapped.
            Place::BeforeFirst => {}
            Place::After(count) => placed.push((count, event)),
            Place::ByTime => by_time.push(event),
        }
    }
    for (count, event) in counts_before(by_time, &parts.events) {
        match count {
            0 if event.event.action == Action::SegmentPaused => parts.paused_before.push(event),
            _ => placed.push((count, event)),
        }
    }
    if placed.is_empty() {
        return;
    }
    placed.sort_by_key(|&(count, _)| count);
    let mut placed = placed.into_iter().peekable();
    let events = mem::take(&mut parts.events);
    let mut all = Vec::with_capacity(events.len() + placed.len());
    for (count, event) in events.into_iter().enumerate() {
        while let Some((_, pause)) = placed.next_if(|&(before, _)| before <= count) {
            all.push(pause);
        }
        all.push(event);
    }
    all.extend(placed.map(|(_, pause)| pause));
    parts.events = all;
}

/// Returns the pauses with the number of events before each, by their times. Clocks differ, so a pause is placed at
/// the earliest after the events that allocated or mapped the paused memory.
fn counts_before(mut pauses: Vec<TraceEvent>, events: &[TraceEvent]) -> Vec<(usize, TraceEvent)> {
    pauses.sort_by_key(|pause| pause.time_us);
    let mut first_after = 0;
    let mut counts = BTreeMap::new();
    for pause in pauses {
        let before = events[first_after..].iter();
        let before = before.take_while(|event| event.time_us <= pause.time_us);
        first_after += before.count();
        counts.insert(pause.event.address.get(), (first_after, pause));
    }
    let earliest = counts.values().map(|&(count, _)| count).min();
    let earliest = earliest.unwrap_or(events.len());
    for (index, event) in events.iter().enumerate().skip(earliest) {
        let kinds = [Action::Alloc, Action::SegmentAlloc, Action::SegmentMap];
        let Event {
            action, address, ..
        } = event.event;
        if !kinds.contains(&action) {
            continue;
        }
        if let Some((&start, (count, pause))) = counts.range_mut(..=address.get()).next_back()
            && address.get() - start < pause.event.size.get()
        {
            *count = (*count).max(index + 1);
        }
    }
    counts.into_values().collect()
}
