//! Which pools are regions' and what of them is paused, as snapshots of this process say it.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::mem;
use std::sync::Arc;

use lowtide_core::{Action, DeviceAddress, DevicePast, Event, MempoolId};
use lowtide_trace::{PausedSegment, RecordedText, RegionPool, StackTable, Trace, TraceEvent};

use crate::error::Error;
use crate::regions::table;
use crate::{devices, events};

/// The tags of the regions whose memory pools have.
type Tags = BTreeMap<MempoolId, RecordedText>;

/// Returns what is known of a device's past as a recording, with its regions and their pauses.
pub(crate) fn trace_of(ordinal: c_int, past: DevicePast) -> Result<Trace, Error> {
    let DevicePast {
        segments,
        events,
        paused,
        kept: _,
    } = past;
    let device = ordinal.unsigned_abs();
    let recovered = Trace::recovered(device, events, segments.clone());
    // What is there now is worth knowing where it does not follow from what was.
    let recovered = recovered.or_else(|_| Trace::recovered(device, [], segments.clone()));
    let trace = recovered.unwrap_or_else(|_| Trace {
        device,
        segments,
        ..Trace::default()
    });
    let pools = table::pools_on(ordinal)?.into_iter();
    let tags = pools
        .map(|(pool, region)| (pool, region.tag.into()))
        .collect();
    Ok(Trace {
        regions: Tags::clone(&tags),
        ..of_segments(trace, &paused, &tags)
    })
}

/// Returns the trace with each pause of a pool as one of every segment that the pool had then. Among its events they
/// have no address, as allocators keep them, and `paused` are the pools whose memory is away at its end.
fn of_segments(mut trace: Trace, paused: &[MempoolId], tags: &Tags) -> Trace {
    let mut held = Held {
        segments: BTreeMap::new(),
        tags,
        stacks: StackTable::clone(&trace.stacks),
    };
    for segment in &trace.initial.segments {
        held.insert(Event {
            action: Action::SegmentAlloc,
            pool: segment.pool.unwrap_or_default(),
            address: segment.address,
            size: segment.size,
            stream: segment.stream,
        });
    }
    let events = mem::take(&mut trace.events);
    for pool in paused_before(&events, paused) {
        let pauses = held.told(pool, Action::SegmentPaused);
        trace.initial.paused.extend(pauses);
    }
    for recorded in events {
        let event = recorded.event;
        match event.action {
            Action::SegmentPaused | Action::SegmentResumed => {
                trace.events.extend(held.told(event.pool, event.action));
                continue;
            }
            Action::SegmentAlloc => held.insert(event),
            Action::SegmentFree => held.remove(event),
            _ => {}
        }
        trace.events.push(recorded);
    }
    trace.stacks = Arc::new(held.stacks);
    trace
}

/// Returns the pools whose memory was away before some events, and after which that of `paused` is.
fn paused_before(events: &[TraceEvent], paused: &[MempoolId]) -> Vec<MempoolId> {
    let mut first: BTreeMap<MempoolId, Action> = BTreeMap::new();
    for TraceEvent { event, .. } in events.iter().filter(|event| event.event.action.is_pause()) {
        first.entry(event.pool).or_insert(event.action);
    }
    let all_along = paused.iter().filter(|pool| !first.contains_key(pool));
    let resumed = { first.iter() }.filter(|&(_, &action)| action == Action::SegmentResumed);
    all_along
        .chain(resumed.map(|(pool, _)| pool))
        .copied()
        .collect()
}

/// The segments of private pools at some moment. Those of regions are whole: what comes from a source does not grow
/// in place.
struct Held<'a> {
    segments: BTreeMap<MempoolId, BTreeMap<DeviceAddress, Event>>,
    tags: &'a Tags,
    stacks: StackTable,
}

impl Held<'_> {
    fn insert(&mut self, segment: Event) {
        if !segment.pool.is_default() {
            let of_pool = self.segments.entry(segment.pool).or_default();
            of_pool.insert(segment.address, segment);
        }
    }

    fn remove(&mut self, segment: Event) {
        if let Some(of_pool) = self.segments.get_mut(&segment.pool) {
            of_pool.remove(&segment.address);
        }
    }

    /// Returns what is told of every segment of a pool.
    fn told(&mut self, pool: MempoolId, action: Action) -> Vec<TraceEvent> {
        let tag = self.tags.get(&pool).map_or("", RecordedText::raw);
        let segments = self
            .segments
            .get(&pool)
            .into_iter()
            .flat_map(BTreeMap::values);
        let told = segments.map(|&segment| {
            let event = Event { action, ..segment };
            TraceEvent::of_pause(event, 0, tag, &mut self.stacks)
        });
        told.collect()
    }
}

/// Adds the regions, and what of them is paused now, to the bytes of a snapshot of this process that another program
/// wrote. It is worth having without that, too.
pub(crate) fn add_to(pickle: &mut Vec<u8>) {
    let regions = regions_now().unwrap_or_default();
    let paused = paused_now().unwrap_or_default();
    if !regions.is_empty() {
        lowtide_trace::add_regions(pickle, &regions, &paused);
    }
}

/// Returns every pool that has the memory of a region.
fn regions_now() -> Result<Vec<RegionPool>, Error> {
    let mut regions = Vec::new();
    for (ordinal, _) in devices::all() {
        let pools = table::pools_on(ordinal)?.into_iter();
        regions.extend(pools.map(|(pool, region)| RegionPool {
            device: ordinal.unsigned_abs(),
            pool,
            tag: region.tag.into(),
        }));
    }
    Ok(regions)
}

/// Returns every segment whose memory is away.
fn paused_now() -> Result<Vec<PausedSegment>, Error> {
    let mut paused = Vec::new();
    // While no pause is told of.
    events::with_listeners(|_| {
        for (ordinal, allocator) in devices::all() {
            let pools = table::pools_on(ordinal)?;
            let segments = allocator.with_all(|device| device.segments())?;
            paused.extend(segments.iter().filter_map(|segment| {
                let region = pools.get(&segment.pool)?;
                Some(PausedSegment {
                    device: ordinal.unsigned_abs(),
                    event: events::pause_event(true, segment),
                    time_us: region.away_since_us?,
                    tag: Arc::clone(&region.tag).into(),
                })
            }));
        }
        Ok(())
    })?;
    Ok(paused)
}

#[cfg(test)]
mod tests {
    use lowtide_core::{Bytes, SegmentSnapshot, Stream};

    use super::*;

    const KV: MempoolId = MempoolId(1, 1);
    const WEIGHTS: MempoolId = MempoolId(2, 2);

    fn event(action: Action, pool: MempoolId, mib: u64) -> Event {
        Event {
            action,
            pool,
            address: DeviceAddress(mib << 20),
            size: Bytes::mib(1),
            stream: Stream(7),
        }
    }

    /// Returns what is kept of a pool's pause.
    fn of_pool(action: Action, pool: MempoolId) -> Event {
        Event {
            address: DeviceAddress::NULL,
            size: Bytes::ZERO,
            ..event(action, pool, 0)
        }
    }

    /// Returns what is told of pauses before the first event and then: the pause or its end, the place of the
    /// segment in MiB, and the tag; of other events the place alone.
    fn told(events: &[Event], at_end: &[(MempoolId, u64)], paused: &[MempoolId]) -> [String; 2] {
        let segments = at_end.iter().map(|&(pool, mib)| {
            let segment = event(Action::SegmentAlloc, pool, mib);
            SegmentSnapshot {
                address: segment.address,
                size: segment.size,
                stream: segment.stream,
                pool,
                is_large: false,
                is_expandable: false,
                blocks: Vec::new(),
            }
        });
        let trace = Trace::recovered(0, events.iter().copied(), segments.collect()).unwrap();
        let tags = [(KV, "kv"), (WEIGHTS, "weights")];
        let tags = tags.map(|(pool, tag)| (pool, tag.into())).into();
        let trace = of_segments(trace, paused, &tags);
        let text = |events: &[TraceEvent]| {
            let texts = events.iter().map(|recorded| {
                let mib = recorded.event.address.get() >> 20;
                let tag = trace.stacks.note(recorded.note).user_metadata;
                match recorded.event.action {
                    Action::SegmentPaused => format!("-{mib} {}", tag.unwrap()),
                    Action::SegmentResumed => format!("+{mib} {}", tag.unwrap()),
                    _ => mib.to_string(),
                }
            });
            texts.collect::<Vec<_>>().join(", ")
        };
        [text(&trace.initial.paused), text(&trace.events)]
    }

    #[test]
    fn a_pause_is_of_the_segments_that_there_are_then() {
        let (away, back) = (Action::SegmentPaused, Action::SegmentResumed);
        let (came, went) = (Action::SegmentAlloc, Action::SegmentFree);
        let events = [
            event(came, KV, 5),
            of_pool(away, KV),
            event(went, KV, 4),
            event(came, WEIGHTS, 9),
            of_pool(back, KV),
            of_pool(away, WEIGHTS),
            event(came, KV, 6),
        ];
        let at_end = [(KV, 3), (KV, 5), (KV, 6), (WEIGHTS, 9)];
        assert_eq!(
            told(&events, &at_end, &[WEIGHTS]),
            [
                "",
                "5, -3 kv, -4 kv, -5 kv, 4, 9, +3 kv, +5 kv, -9 weights, 6"
            ]
        );
    }

    #[test]
    fn what_was_paused_before_the_first_event_is_so_then() {
        let events = [
            event(Action::SegmentFree, KV, 4),
            of_pool(Action::SegmentResumed, KV),
            event(Action::SegmentAlloc, KV, 5),
        ];
        let at_end = [(KV, 3), (KV, 5), (WEIGHTS, 9)];
        assert_eq!(
            told(&events, &at_end, &[WEIGHTS]),
            ["-9 weights, -3 kv, -4 kv", "4, +3 kv, 5"]
        );
        assert_eq!(told(&[], &at_end, &[]), ["", ""]);
        assert_eq!(told(&[], &at_end, &[KV]), ["-3 kv, -5 kv", ""]);
    }
}
