//! The clock of the simulated device follows the times of a recording.

use lowtide_core::{Bytes, Config, DeviceAllocator, Event, Stream};
use lowtide_replay::{Job, Options};
use lowtide_sim::SimDriver;
use lowtide_trace::Trace;

/// Returns the recording of a job that holds up to 1 GiB in blocks of random sizes.
fn random_sizes() -> Trace {
    const LIVE: Bytes = Bytes::gib(1);
    let mut allocator = DeviceAllocator::new(SimDriver::default(), 0, &Config::default());
    allocator.lane_mut().event_log().record(true);
    let mut state = 1_u64;
    let mut below = |end: u64| {
        // The generator of Knuth's MMIX.
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % end
    };
    let mut blocks = Vec::new();
    for _ in 0..40_000 {
        let most = 1 << (10 + below(16));
        let size = Bytes(most / 2 + below(most / 2));
        while allocator.stats().allocated() + size > LIVE {
            let index = below(blocks.len() as u64);
            let block = blocks.swap_remove(usize::try_from(index).expect("it is an index"));
            allocator.free(block).expect("it is allocated");
        }
        let block = allocator.allocate(size, Stream::DEFAULT);
        blocks.push(block.expect("the device has no limit"));
    }
    let segments = allocator.segments();
    let events: Vec<Event> = allocator.lane_mut().event_log().take().collect();
    Trace::recovered(0, events, segments).expect("it happened")
}

/// Returns the most that `tide` reserves for a job whose events have these times.
fn reserved(trace: &mut Trace, time_us: impl Fn(i64) -> i64) -> Bytes {
    for (index, event) in (0..).zip(&mut trace.events) {
        event.time_us = time_us(index);
    }
    let config = "tide".parse().expect("the strategy exists");
    let outcome = Job::new(trace).replay(&config, &Options::default(), &());
    outcome.expect("it can be replayed").peak_reserved_bytes
}

#[test]
fn a_job_that_makes_requests_slowly_has_time_to_move_memory() {
    let mut trace = random_sizes();
    let fast = reserved(&mut trace, |index| index);
    let slow = reserved(&mut trace, |index| index * 10_000);
    assert!(slow < fast, "{slow}, {fast}");
    // A file may claim any times.
    let without = reserved(&mut trace, |_| 0);
    assert_eq!(without, reserved(&mut trace, |_| i64::MIN));
    assert_eq!(without, reserved(&mut trace, |index| -index));
    let wild = reserved(&mut trace, |index| match index % 3 {
        0 => i64::MIN,
        1 => i64::MAX,
        _ => index,
    });
    assert!((slow..=without).contains(&wild), "{wild}");
}
