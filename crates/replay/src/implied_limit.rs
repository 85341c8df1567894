//! The limit that a job died under, inferred from the request that failed.

use lowtide_core::{Action, Bytes};
use lowtide_trace::Trace;

/// A limit is told if its bounds differ by at most this part of it. A request of half the job's memory that failed says
/// little about the limit.
const WIDTH_PART: u64 = 8;

/// More memory than any device has.
const DEVICE_MAX: Bytes = Bytes::gib(64 << 10);

/// The limit on reserved bytes of a job that ran out of memory although its device had some left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ImpliedLimit {
    /// The peak of reserved bytes: the limit was not lower.
    pub least: Bytes,
    /// What would have been reserved with the request that failed: the limit was lower.
    pub most: Bytes,
    /// The size of that request.
    pub refused: Bytes,
    /// The memory that the device had left then.
    pub left: Bytes,
}

impl ImpliedLimit {
    /// Returns the limit that a job died under. O(n) for n events.
    ///
    /// `None` if a later request was served, if the device lacked the memory, and if the recorded settings have the limit.
    /// Also if memory was paused, which limits do not count, and if the bounds lie far apart.
    pub fn of(trace: &Trace) -> Option<ImpliedLimit> {
        let settings = trace.config_in_force().unwrap_or_default();
        if trace.has_pauses() || settings.per_process_memory_fraction < 1.0 {
            return None;
        }
        // A request may need a page more at either end.
        let slack = settings.large_segment_size + settings.large_segment_size;
        let limit = Self::at_last_request(trace)?;
        let least = limit.least;
        let is_of_device = limit.refused.saturating_add(slack) > limit.left;
        let is_wide = limit.most.saturating_sub(least) > Bytes(least.get() / WIDTH_PART);
        let is_contradicted = least > limit.most.saturating_add(slack);
        let is_possible = limit.left.saturating_add(limit.most) <= DEVICE_MAX;
        (is_possible && !is_of_device && !is_wide && !is_contradicted).then_some(limit)
    }

    /// Returns what the last request shows, if it failed.
    fn at_last_request(trace: &Trace) -> Option<ImpliedLimit> {
        let events = trace.events.iter().map(|recorded| recorded.event);
        let requests = events
            .zip(trace.reserved_bytes())
            .filter(|(event, _)| matches!(event.action, Action::Alloc | Action::OutOfMemory));
        let (event, reserved) = requests
            .last()
            .filter(|(event, _)| event.action == Action::OutOfMemory)?;
        Some(ImpliedLimit {
            least: trace.peak_reserved_bytes(),
            most: reserved.saturating_add(event.size),
            refused: event.size,
            // The event's address holds the bytes that the device had left.
            left: Bytes(event.address.get()),
        })
    }
}

#[cfg(test)]
mod tests {
    use lowtide_core::{DeviceAddress, Event, MempoolId, Stream};
    use lowtide_trace::{NoteId, StackId, TraceEvent};

    use super::*;

    /// Returns a recording of events: their action, address and size in MiB.
    fn trace(events: &[(Action, u64, u64)]) -> Trace {
        let recorded = |&(action, address, mib)| TraceEvent {
            event: Event {
                action,
                pool: MempoolId::DEFAULT,
                address: DeviceAddress(address << 20),
                size: Bytes::mib(mib),
                stream: Stream::DEFAULT,
            },
            time_us: 0,
            stack: StackId::NONE,
            pool_known: true,
            note: NoteId::NONE,
        };
        Trace {
            events: events.iter().map(recorded).collect(),
            ..Trace::default()
        }
    }

    const TAKEN: (Action, u64, u64) = (Action::SegmentAlloc, 1 << 20, 10_000);
    const RETURNED: (Action, u64, u64) = (Action::SegmentFree, 1 << 20, 3000);
    /// 4,000 MiB failed while the device had 50,000 MiB left.
    const FAILED: (Action, u64, u64) = (Action::OutOfMemory, 50_000, 4000);

    #[test]
    fn the_limit_lies_between_what_was_held_and_what_was_refused() {
        let limit = ImpliedLimit::of(&trace(&[TAKEN, RETURNED, FAILED]));
        let expected = ImpliedLimit {
            least: Bytes::mib(10_000),
            most: Bytes::mib(11_000),
            refused: Bytes::mib(4000),
            left: Bytes::mib(50_000),
        };
        assert_eq!(limit, Some(expected));
        let freed = (Action::FreeRequested, 1 << 20, 1);
        let limit = ImpliedLimit::of(&trace(&[TAKEN, RETURNED, FAILED, freed, FAILED, freed]));
        assert_eq!(
            limit,
            Some(expected),
            "what is freed at the end is no request"
        );
    }

    #[test]
    fn a_limit_that_is_not_certain_is_not_told() {
        let block = (Action::Alloc, 1 << 20, 1);
        let more = (Action::SegmentAlloc, 1 << 21, 1200);
        for (events, why) in [
            (vec![TAKEN, RETURNED], "nothing failed"),
            (vec![TAKEN, RETURNED, FAILED, block], "the job went on"),
            (vec![TAKEN, FAILED], "4,000 MiB above 10,000 are far apart"),
            (
                vec![TAKEN, (Action::OutOfMemory, 4039, 4000)],
                "the device was full",
            ),
            (
                vec![TAKEN, RETURNED, RETURNED, FAILED],
                "8,000 MiB failed, 10,000 did not",
            ),
            (
                vec![TAKEN, RETURNED, FAILED, more, more, more, more],
                "11,800 MiB were held later",
            ),
            (
                vec![TAKEN, RETURNED, (Action::OutOfMemory, 1 << 40, 4000)],
                "no device has that",
            ),
        ] {
            assert_eq!(ImpliedLimit::of(&trace(&events)), None, "{why}");
        }
        let mut with_fraction = trace(&[TAKEN, RETURNED, FAILED]);
        with_fraction.settings.conf = "per_process_memory_fraction:0.5".into();
        assert_eq!(ImpliedLimit::of(&with_fraction), None);
    }
}
