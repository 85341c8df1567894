//! Recordings of one job under each strategy. A few events made by hand are in `evidence.rs`.
#![expect(clippy::unwrap_used, reason = "a test that cannot replay fails")]

use lowtide_core::{Bytes, Config, DeviceAllocator, Event, Stream};
use lowtide_replay::{Job, Options, Outcome};
use lowtide_sim::{SimConfig, SimDriver};
use lowtide_trace::Trace;

/// How much idle memory is released at once.
const IDLE: Bytes = Bytes::mib(2);
/// Free memory of this size leaves idle pages after that.
const IDLE_MIN: Bytes = Bytes::mib(8);

/// Records a job of requests up to 32 MiB under a strategy. The job may empty the cache twice. The strategy releases
/// idle memory now and then, if it can.
fn recorded_under(strategy: &str, empties: bool) -> Trace {
    let config: Config = strategy.parse().unwrap();
    let mut allocator = DeviceAllocator::new(SimDriver::new(SimConfig::default()), 0, &config);
    allocator.lane_mut().event_log().record(true);
    let (mut state, mut held) = (1_u64, Vec::new());
    let mut random = move |below: u64| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 33) % below
    };
    let mut next = 1_000;
    for step in 0..4_000 {
        if held.len() > 40 || !held.is_empty() && random(2) == 0 {
            // Right before a request that maps as much, it would look like a move.
            if empties && step >= next {
                allocator.empty_cache(None).unwrap();
                next += 1_500;
            }
            let index = usize::try_from(random(held.len() as u64)).unwrap();
            allocator.free(held.swap_remove(index)).unwrap();
        } else {
            let bits = 10 + random(16);
            let size = Bytes(1 + random(1 << bits));
            held.push(allocator.allocate(size, Stream::DEFAULT).unwrap());
        }
        // A release of all that is idle would look like `empty_cache`.
        if step % 70 == 30 && allocator.largest_request(Bytes::ZERO) > IDLE_MIN {
            let idle = allocator.lane_mut().release_unused(u64::MAX, IDLE);
            idle.unwrap();
        }
    }
    let segments = allocator.segments();
    let events: Vec<Event> = allocator.lane_mut().event_log().take().collect();
    let mut trace = Trace::recovered(0, events, segments).unwrap();
    trace.settings.strategy = strategy.into();
    trace
}

/// Returns what replays of a recording reserve and ask of the driver.
fn replayed(trace: &Trace) -> [(Bytes, [u64; 4]); 3] {
    ["caching", "caching:expandable_segments:True", "tide"].map(|config| {
        let config: Config = config.parse().unwrap();
        let replayed = Job::new(trace).replay(&config, &Options::default(), &());
        let Outcome {
            peak_reserved_bytes,
            device_allocs,
            device_frees,
            maps,
            unmaps,
            ..
        } = replayed.unwrap();
        (
            peak_reserved_bytes,
            [device_allocs, device_frees, maps, unmaps],
        )
    })
}

/// What a replay says of a job does not depend on the strategy under which it was recorded. `tide` unmaps memory from
/// some addresses to map it at others, and releases what is idle; that empties no cache.
#[test]
fn a_job_is_the_same_whatever_strategy_served_it() {
    let expected = replayed(&recorded_under("caching", false));
    for strategy in [
        "caching:expandable_segments:True",
        "tide",
        "bfc",
        "buddy",
        "slab",
        "pool",
        "direct",
    ] {
        assert_eq!(
            replayed(&recorded_under(strategy, false)),
            expected,
            "{strategy}"
        );
    }
    // Others keep memory that is free in parts, and do not show that the cache was emptied.
    let expected = replayed(&recorded_under("caching", true));
    for strategy in ["caching:expandable_segments:True", "tide"] {
        assert_eq!(
            replayed(&recorded_under(strategy, true)),
            expected,
            "{strategy}"
        );
    }
}
