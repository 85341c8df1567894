//! Recordings that end at or shortly before an out-of-memory error, including recordings that lost their beginning.

use lowtide_core::{
    AllocError, Bytes, Config, DeviceAllocator, DirectConfig, Event, MempoolId, Stream,
};
use lowtide_replay::{Job, Options, Outcome};
use lowtide_sim::program::configs;
use lowtide_sim::{SimConfig, SimDriver};
use lowtide_trace::Trace;

const CAPACITY: Bytes = Bytes::mib(100);
const POOL: MempoolId = MempoolId(1, 0);

type Allocator = DeviceAllocator<SimDriver>;

/// Returns recordings of what `act` does: one for each number of last events, the whole recording last.
fn recordings(act: impl FnOnce(&mut Allocator) -> Result<(), AllocError>) -> Vec<Trace> {
    let driver = SimDriver::new(SimConfig {
        capacity: Some(CAPACITY),
        ..SimConfig::default()
    });
    let mut allocator = DeviceAllocator::new(driver, 0, &Config::default());
    allocator.lane_mut().event_log().record(true);
    act(&mut allocator).expect("the job goes on");
    let segments = allocator.segments();
    let events: Vec<Event> = allocator.lane_mut().event_log().take().collect();
    let last = |count| events[events.len() - count..].iter().copied();
    let recorded = |count| Trace::recovered(0, last(count), segments.clone());
    (1..=events.len())
        .map(|count| recorded(count).expect("it happened"))
        .collect()
}

fn replay(trace: &Trace, config: &Config) -> Outcome {
    let options = Options {
        capacity: Some(CAPACITY),
        ..Options::default()
    };
    let outcome = Job::new(trace).replay(config, &options, &());
    outcome.expect("a job that does not fit is no error")
}

/// Allocates 60 MiB in the pool and frees them, and allocates 20 MiB in the default pool.
fn fill(allocator: &mut Allocator) -> Result<(), AllocError> {
    let freed = allocator.allocate_in(POOL, Bytes::mib(60), Stream(1))?;
    allocator.free(freed)?;
    allocator.allocate(Bytes::mib(20), Stream::DEFAULT)?;
    Ok(())
}

#[test]
fn what_a_live_pool_holds_free_serves_no_other_request() {
    let refused = recordings(|allocator| {
        fill(allocator)?;
        let error = allocator.allocate(Bytes::mib(30), Stream::DEFAULT);
        assert!(error.is_err_and(|error| error.is_out_of_memory()));
        Ok(())
    });
    for (count, trace) in (1..).zip(&refused) {
        for config in configs() {
            let fits = replay(trace, &config).completed;
            assert_eq!(
                fits,
                config == Config::Direct(DirectConfig),
                "{config}, {count} events"
            );
        }
    }
}

#[test]
fn what_a_pool_holds_free_serves_its_own_requests() {
    let served = recordings(|allocator| {
        fill(allocator)?;
        allocator.allocate_in(POOL, Bytes::mib(50), Stream(1))?;
        Ok(())
    });
    for (count, trace) in (1..).zip(&served) {
        let outcome = replay(trace, &Config::default());
        assert!(outcome.completed, "{count} events");
        assert_eq!(
            outcome.peak_reserved_bytes,
            Bytes::mib(80),
            "{count} events"
        );
        // Memory that was freed before the first event does not count.
        let saw_it = trace.initial.segments.is_empty();
        let allocated = Bytes::mib(if saw_it { 80 } else { 70 });
        assert!(outcome.peak_allocated_bytes <= allocated, "{count} events");
    }
}

#[test]
fn what_a_pool_held_is_free_for_others_once_it_has_ended() {
    let served = recordings(|allocator| {
        fill(allocator)?;
        allocator.lane_mut().release_pool(POOL)?;
        allocator.allocate(Bytes::mib(60), Stream::DEFAULT)?;
        Ok(())
    });
    // The last events are the release of memory, a new segment and a block.
    for (count, trace) in (1..).zip(&served).skip(2) {
        for config in ["caching", "caching:expandable_segments:True"] {
            let config = config.parse().expect("a configuration");
            assert!(replay(trace, &config).completed, "{config}, {count} events");
        }
    }
}

/// As PyTorch does, because of its issue pytorch#189504.
#[test]
fn what_a_wait_made_free_serves_a_replay_that_asks_for_it() {
    let refused = recordings(|allocator| {
        let whole = allocator.allocate(Bytes::mib(60), Stream::DEFAULT)?;
        allocator.free(whole)?;
        allocator.allocate(Bytes::mib(22), Stream::DEFAULT)?;
        let waits = allocator.allocate(Bytes::mib(38), Stream::DEFAULT)?;
        allocator.allocate(Bytes::mib(30), Stream::DEFAULT)?;
        allocator.lane_mut().record_stream(waits, Stream(2))?;
        allocator.driver().launch(Stream(2), 1_000_000);
        allocator.free(waits)?;
        // A block that is free as soon as it is freed leaves the same two events.
        allocator.allocate(Bytes::mib(1), Stream::DEFAULT)?;
        let error = allocator.allocate(Bytes::mib(38), Stream::DEFAULT);
        assert!(error.is_err_and(|error| error.is_out_of_memory()));
        Ok(())
    });
    let whole = refused.last().expect("there are events");
    assert!(!replay(whole, &Config::default()).completed);
    assert!(replay(whole, &Config::default().in_job()).completed);
    let verified = Job::new(whole).replay(
        &Config::default(),
        &Options {
            verify: true,
            ..Options::default()
        },
        &(),
    );
    let verified = verified.expect("it is replayed").verified;
    assert_eq!(verified.expect("asked for").first_difference, None);
}
