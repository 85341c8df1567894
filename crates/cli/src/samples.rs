//! A job and its outcomes for tests.

use lowtide_core::{Bytes, Config, DeviceAddress, MempoolId, Stream};
use lowtide_replay::{Options, Outcome};
use lowtide_trace::{InitialSegment, Trace};

use crate::job::Job;
use crate::replays::Failure;

/// Returns a job of 100 s whose live bytes peak at 1 GiB.
pub(crate) fn job() -> Job {
    Job {
        path: "job.pickle".into(),
        device: 0,
        events: 3000,
        allocs: 1000,
        streams: 1,
        peak_live_bytes: Bytes::gib(1),
        peak_live_pages_bytes: Bytes::gib(1),
        peak_requested_bytes: Bytes::gib(1),
        peak_reserved_bytes: Bytes::gib(2),
        strategy: "caching".into(),
        is_on_lowtide: false,
        lost_beginning: None,
        is_cut_off: false,
        missed_events: 0,
        duration_us: Some(100e6),
        has_pauses: false,
    }
}

/// Returns the outcome of [`job`] with `config`: peak reserved bytes of `peak`, and a millisecond in the driver.
pub(crate) fn outcome(config: &str, peak: Bytes) -> Outcome {
    let config: Config = config.parse().unwrap();
    Outcome {
        strategy: config.name(),
        config: config.to_conf(),
        completed: true,
        oom_at_event: None,
        oom_message: None,
        peak_reserved_bytes: peak,
        peak_allocated_bytes: Bytes::gib(1),
        reserved_ratio: crate::format::ratio(peak, Bytes::gib(1)),
        device_allocs: 100,
        device_frees: 1,
        maps: 20,
        unmaps: 3,
        remapped_bytes: Bytes::ZERO,
        retries: 0,
        driver_time_us: 1000.0,
        ns_per_op: 50.0,
        verified: None,
        stats: Default::default(),
        timeline: Vec::new(),
    }
}

/// Returns the outcome of a job that ran out of memory at `event`.
pub(crate) fn refused(config: &str, event: usize) -> Outcome {
    Outcome {
        completed: false,
        oom_at_event: Some(event),
        oom_message: Some("CUDA out of memory.".into()),
        ..outcome(config, Bytes::mib(900))
    }
}

/// Returns the failure of a recording that cannot be replayed with `config`: two of its segments overlap.
pub(crate) fn failure(config: &str) -> Failure {
    let segment = |mib: u64, is_expandable| InitialSegment {
        address: DeviceAddress(mib << 20),
        size: Bytes::mib(40),
        stream: Stream::DEFAULT,
        pool: Some(MempoolId::DEFAULT),
        is_large: true,
        is_expandable,
    };
    let mut trace = Trace::default();
    trace.initial.segments = vec![segment(100, true), segment(120, false)];
    trace.settings.conf = "expandable_segments:True".into();
    let expandable = "caching:expandable_segments:True".parse().unwrap();
    let options = Options {
        verify: true,
        ..Options::default()
    };
    let outcome = lowtide_replay::Job::new(&trace).replay(&expandable, &options, &());
    Failure {
        config: config.parse().unwrap(),
        error: outcome.unwrap_err(),
    }
}
