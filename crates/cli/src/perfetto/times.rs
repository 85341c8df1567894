//! The times of a recording's instants.

use lowtide_trace::Trace;

/// The last nanosecond that an event is put after the beginning of its microsecond.
const WITHIN_MICROSECOND_MAX: i64 = 999;

/// The time of each instant of a trace, ascending.
#[derive(Debug)]
pub(super) struct Times {
    /// Nanoseconds since 1970 or, without times, from 0. The last one is the end of the recording.
    instants_ns: Vec<i64>,
    /// The time of the first event, or of a mark before it.
    begin_ns: i64,
}

/// Returns whether a trace has times. PyTorch 2.1 recorded none.
pub(super) fn are_recorded(trace: &Trace) -> bool {
    trace.events.first().is_some_and(|event| event.time_us > 0)
}

impl Times {
    /// Returns the recorded times. Events of the same microsecond are a nanosecond apart, in their order. Threads may
    /// record events in another order than that of their times: such an event has the time of the one before. Linear
    /// time.
    pub(super) fn recorded(trace: &Trace) -> Times {
        let events_us = trace.events.iter().map(|event| event.time_us);
        let first_us = events_us.clone().next().unwrap_or(0);
        let marks_us = || trace.annotations.iter().map(|mark| mark.time_us);
        let end_us = marks_us().max().unwrap_or(0);
        let mut times = Times::ascending(first_us, events_us.chain([end_us]));
        let first_mark_ns = marks_us().min().map_or(i64::MAX, nanoseconds);
        times.begin_ns = times.begin_ns.min(first_mark_ns);
        times
    }

    /// Returns times for a trace without any: an event takes a microsecond.
    pub(super) fn numbered(trace: &Trace) -> Times {
        let end = i64::try_from(trace.events.len()).unwrap_or(i64::MAX);
        Times::ascending(0, 1..=end.saturating_add(1))
    }

    /// Returns the time before the first event, and those of the events and of the end.
    fn ascending(begin_us: i64, times_us: impl Iterator<Item = i64>) -> Times {
        let mut last_us = begin_us;
        let mut within_ns = 0;
        let begin_ns = nanoseconds(begin_us);
        let mut instants_ns = vec![begin_ns];
        for time_us in times_us {
            within_ns = if time_us > last_us { 0 } else { within_ns + 1 };
            last_us = last_us.max(time_us);
            let within = within_ns.min(WITHIN_MICROSECOND_MAX);
            instants_ns.push(nanoseconds(last_us).saturating_add(within));
        }
        Times {
            instants_ns,
            begin_ns,
        }
    }

    /// Returns the time of an instant; that of the end for the number of events plus one.
    ///
    /// # Panics
    ///
    /// If there is no such instant.
    pub(super) fn at(&self, instant: u32) -> i64 {
        self.instants_ns[instant as usize]
    }

    /// Returns the beginning and the end of the recording.
    pub(super) fn ends(&self) -> (i64, i64) {
        (self.begin_ns, self.instants_ns[self.instants_ns.len() - 1])
    }
}

/// Returns a recorded time in nanoseconds.
pub(super) fn nanoseconds(time_us: i64) -> i64 {
    time_us.saturating_mul(1000)
}

#[cfg(test)]
mod tests {
    use super::Times;

    #[test]
    fn times_ascend_and_events_of_a_microsecond_are_in_order() {
        let times = Times::ascending(5, [5, 5, 7, 6, 7, 9].into_iter());
        let instants = (0..7).map(|instant| times.at(instant));
        let expected = [5000, 5001, 5002, 7000, 7001, 7002, 9000];
        assert!(instants.eq(expected));
        assert_eq!(times.ends(), (5000, 9000));
        let many = Times::ascending(0, (0..5000).map(|_| 0).chain([1]));
        assert_eq!((many.at(4999), many.at(5001)), (999, 1000));
        let edges = Times::ascending(i64::MAX, [i64::MIN, i64::MAX].into_iter());
        assert_eq!(edges.ends(), (i64::MAX, i64::MAX));
    }
}
