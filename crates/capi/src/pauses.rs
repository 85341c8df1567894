//! The regions' pools and pauses in snapshots of this process.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::mem;
use std::sync::Arc;

use lowtide_core::{Action, AllocError, DeviceAddress, DevicePast, Event, MempoolId};
use lowtide_trace::{
    PausedSegment, RecordedText, RegionPool, Snapshot, StackTable, Trace, TraceEvent,
};

use crate::devices::{self, Allocator};
use crate::error::{Error, Status};
use crate::regions::table;
use crate::{events, settings};

/// The tag of the region that each memory pool belongs to.
type Tags = BTreeMap<MempoolId, RecordedText>;

/// Returns a snapshot of the devices in use, and its pickle. `past_of` returns what is known of a device.
///
/// # Errors
///
/// If the configuration is refused, or lowtide panicked before.
pub(crate) fn snapshot_of(
    past_of: impl Fn(&Allocator) -> Result<DevicePast, AllocError>,
) -> Result<(Vec<u8>, Snapshot), Error> {
    let settings = settings::recorded()?;
    let mut snapshot = Snapshot::default();
    for (ordinal, allocator) in devices::all() {
        snapshot.traces.push(Trace {
            settings: settings.clone(),
            ..trace_of(ordinal, past_of(allocator)?)?
        });
    }
    let mut pickle = Vec::new();
    let written = lowtide_trace::write_pickle(&snapshot, &mut pickle);
    written.map_err(|error| Error::new(Status::Internal, error))?;
    Ok((pickle, snapshot))
}

/// Returns a device's recorded past as a trace, with its regions and their pauses.
fn trace_of(ordinal: c_int, past: DevicePast) -> Result<Trace, Error> {
    let DevicePast {
        segments,
        events,
        paused,
        kept: _,
    } = past;
    let device = ordinal.unsigned_abs();
    let recovered = Trace::recovered(device, events, segments.clone());
    // If the past is inconsistent with the present, the present segments alone are still worth reporting.
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

/// Expands each pause of a pool into one pause event per segment that the pool had at that time. Allocators log a
/// pause of a pool without an address. `paused` are the pools that are paused at the end of the trace.
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
        let pauses = held.pauses(pool, Action::SegmentPaused);
        trace.initial.paused.extend(pauses);
    }
    for recorded in events {
        let event = recorded.event;
        match event.action {
            Action::SegmentPaused | Action::SegmentResumed => {
                trace.events.extend(held.pauses(event.pool, event.action));
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

/// Returns the pools that were paused before the events, given the pools in `paused`, which are paused after
/// them.
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

/// The segments of private pools at some moment. The segments of regions are whole: a segment from a source does
/// not grow in place.
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

    /// Returns the events for every segment of a pool.
    fn pauses(&mut self, pool: MempoolId, action: Action) -> Vec<TraceEvent> {
        let tag = self.tags.get(&pool).map_or("", RecordedText::raw);
        let segments = self
            .segments
            .get(&pool)
            .into_iter()
            .flat_map(BTreeMap::values);
        let pauses = segments.map(|&segment| {
            let event = Event { action, ..segment };
            TraceEvent::with_metadata(event, 0, tag, &mut self.stacks)
        });
        pauses.collect()
    }
}

/// Adds the regions and what of them is paused now to the bytes of a snapshot that another program wrote of this
/// process. On failure the snapshot stays as it is.
pub(crate) fn add_to(pickle: &mut Vec<u8>) {
    let regions = regions_now().unwrap_or_default();
    let paused = paused_now().unwrap_or_default();
    if !regions.is_empty() {
        lowtide_trace::add_regions(pickle, &regions, &paused);
    }
}

/// Returns every pool whose memory is a region's.
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

/// Returns every paused segment.
fn paused_now() -> Result<Vec<PausedSegment>, Error> {
    let mut paused = Vec::new();
    // No pause is notified meanwhile.
    events::with_listeners(|_| {
        for (ordinal, allocator) in devices::all() {
            let pools = table::pools_on(ordinal)?;
            let segments = allocator.with_all(|device| device.segments())?;
            paused.extend(segments.iter().filter_map(|segment| {
                let region = pools.get(&segment.pool)?;
                Some(PausedSegment {
                    device: ordinal.unsigned_abs(),
                    event: events::pause_event(true, segment),
                    time_us: region.paused_since_us?,
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

    /// Returns the logged event of a pool's pause.
    fn of_pool(action: Action, pool: MempoolId) -> Event {
        Event {
            address: DeviceAddress::NULL,
            size: Bytes::ZERO,
            ..event(action, pool, 0)
        }
    }

    /// Returns the pauses before the first event, and the events. A pause or resume has the segment's address in
    /// MiB and the tag; other events have the address alone.
    fn expanded(
        events: &[Event],
        at_end: &[(MempoolId, u64)],
        paused: &[MempoolId],
    ) -> [String; 2] {
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
            expanded(&events, &at_end, &[WEIGHTS]),
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
            expanded(&events, &at_end, &[WEIGHTS]),
            ["-9 weights, -3 kv, -4 kv", "4, +3 kv, 5"]
        );
        assert_eq!(expanded(&[], &at_end, &[]), ["", ""]);
        assert_eq!(expanded(&[], &at_end, &[KV]), ["-3 kv, -5 kv", ""]);
    }
}
