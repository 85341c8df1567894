//! The lines that users read below the error of an allocator that ran out of memory.

#![expect(clippy::unwrap_used, reason = "in what the tests share")]

use std::sync::Arc;
use std::time::Duration;

use lowtide_core::{
    AllocError, Bytes, Config, DeviceAddress, DeviceAllocator, Event, KeptPool, Lane, MempoolId,
    OutOfMemory, PoolSetting, Stream,
};
use lowtide_explain::{Configured, Shortfall};
use lowtide_shared::SharedAllocator;
use lowtide_sim::{SimConfig, SimDriver};
use proptest::prelude::*;

/// An allocator whose events are all kept.
struct Job {
    allocator: DeviceAllocator<SimDriver>,
    capacity: Bytes,
    config: Config,
    events: Vec<Event>,
}

impl Job {
    fn new(config: &str, capacity: Bytes) -> Job {
        let config: Config = config.parse().unwrap();
        let driver = SimDriver::new(SimConfig {
            capacity: Some(capacity),
            ..SimConfig::default()
        });
        let mut allocator = DeviceAllocator::new(driver, 0, &config);
        allocator.lane_mut().event_log().record(true);
        Job {
            allocator,
            capacity,
            config,
            events: Vec::new(),
        }
    }

    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, Box<OutOfMemory>> {
        self.allocate_in(MempoolId::DEFAULT, size)
    }

    fn allocate_in(
        &mut self,
        pool: MempoolId,
        size: Bytes,
    ) -> Result<DeviceAddress, Box<OutOfMemory>> {
        let result = self.allocator.allocate_in(pool, size, Stream::DEFAULT);
        self.events
            .extend(self.allocator.lane_mut().event_log().take());
        result.map_err(|error| match error {
            AllocError::OutOfMemory(figures) => figures,
            other => panic!("{other}"),
        })
    }

    fn free(&mut self, address: DeviceAddress) {
        self.allocator.free(address).unwrap();
        self.events
            .extend(self.allocator.lane_mut().event_log().take());
    }

    /// Returns the state when `error` occurred, with the last `events` events before it.
    fn shortfall(&self, error: &OutOfMemory, events: usize) -> Shortfall {
        Shortfall {
            device: error.device,
            requested: error.requested,
            stream: error.stream,
            pool: error.pool,
            capacity: self.capacity,
            is_limited: true,
            kept_by_margin: None,
            free_block_order: None,
            config: self.config.clone(),
            configured: OF_ENVIRONMENT,
            segments: self.allocator.segments(),
            kept_pools: self.allocator.recent_past().kept,
            events: self.events[self.events.len() - events.min(self.events.len())..].to_vec(),
        }
    }
}

const OF_ENVIRONMENT: Configured = Configured {
    options_variable: Some("PYTORCH_CUDA_ALLOC_CONF"),
    is_by_program: false,
};

/// The words of a verdict when a replay under the settings in use, which ran out, serves the request too.
const SERVES_TOO: &str = " with the settings in use, too: ";

const NO_HURRY: Duration = Duration::from_secs(3600);

/// Two segments of 40 MiB, each with a block of 22 MiB: 20 MiB of the device are left, and two free blocks of 18
/// MiB that cannot merge. If addresses are contiguous, the third block lies behind the second.
fn fragmented() -> (Job, Box<OutOfMemory>) {
    let mut job = Job::new("caching", Bytes::mib(100));
    let segments = [40, 40].map(|mib| job.allocate(Bytes::mib(mib)).unwrap());
    segments.into_iter().for_each(|address| job.free(address));
    for mib in [22, 22] {
        job.allocate(Bytes::mib(mib)).unwrap();
    }
    let error = job.allocate(Bytes::mib(30)).unwrap_err();
    (job, error)
}

#[test]
fn what_would_have_fitted_is_replayed() {
    let (job, error) = fragmented();
    let lines = job
        .shortfall(&error, usize::MAX)
        .explain(NO_HURRY)
        .to_string();
    assert_eq!(
        lines,
        "Reserved and not live: 36.00 MiB of 80.00 MiB: 36.00 MiB free between blocks of segments in use.\n\
         Would have fitted, by a replay of the last 11 events: \
         PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (80.00 MiB reserved), --strategy tide (80.00 MiB \
         reserved), --strategy pool (92.00 MiB reserved); 5 others not."
    );
}

#[test]
fn what_the_program_gave_is_changed_in_the_program() {
    let (job, error) = fragmented();
    let shortfall = |configured| Shortfall {
        configured,
        ..job.shortfall(&error, usize::MAX)
    };
    let by_arguments = Configured {
        options_variable: None,
        is_by_program: true,
    };
    let lines = shortfall(by_arguments).explain(NO_HURRY).to_string();
    let expected = "lowtide.install(config=\"expandable_segments:True\") (80.00 MiB reserved), \
                    lowtide.install(strategy=\"tide\") (80.00 MiB reserved), \
                    lowtide.install(strategy=\"pool\") (92.00 MiB reserved); 5 others not.";
    assert!(lines.ends_with(expected), "{lines}");
    let by_name_alone = Configured {
        options_variable: Some("PYTORCH_CUDA_ALLOC_CONF"),
        is_by_program: true,
    };
    let lines = shortfall(by_name_alone).explain(NO_HURRY).to_string();
    let expected = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (80.00 MiB reserved), \
                    lowtide.install(strategy=\"tide\") (80.00 MiB reserved), \
                    lowtide.install(strategy=\"pool\") (92.00 MiB reserved); 5 others not.";
    assert!(lines.ends_with(expected), "{lines}");
}

/// The settings in use ran out. If they do not in a replay, the replay proves nothing about any settings.
#[test]
fn nothing_is_claimed_where_the_settings_in_use_would_fit_too() {
    let (mut job, error) = fragmented();
    let verdict = |job: &Job, error: &OutOfMemory, events| {
        let lines = job.shortfall(error, events).explain(NO_HURRY).to_string();
        lines.lines().last().unwrap().to_owned()
    };
    assert_eq!(
        verdict(&job, &error, 0),
        "Would have fitted: not known, as what is held, placed anew, leaves room for the request with the settings in \
         use, too: something that a replay does not know is in the way, such as what came before, a capture, a memory pool, a \
         margin or another process."
    );
    // The last two events change nothing; the events that fragmented the memory came before them.
    let small = job.allocate(Bytes::mib(1)).unwrap();
    job.free(small);
    let again = job.allocate(Bytes::mib(30)).unwrap_err();
    assert_eq!(
        verdict(&job, &again, 3),
        "Would have fitted: not known, as a replay of the last 2 events serves the request with the settings in use, \
         too: something that a replay does not know is in the way, such as what came before, a capture, a memory pool, a \
         margin or another process."
    );
}

/// A device of 100 MiB: `pool` keeps 60 MiB, `used` of them in use, and the default pool has 20 MiB.
fn with_pool(pool: MempoolId, used: Bytes) -> Job {
    let mut job = Job::new("caching", Bytes::mib(100));
    let block = job.allocate_in(pool, Bytes::mib(60)).unwrap();
    job.free(block);
    if !used.is_zero() {
        job.allocate_in(pool, used).unwrap();
    }
    job.allocate(Bytes::mib(20)).unwrap();
    job
}

#[test]
fn what_a_live_pool_keeps_free_is_held_in_every_replay_and_named() {
    let released_by = |pool, how: &str| format!("in pool {pool}, until {how}");
    let graph = MempoolId(3, 0);
    let of_graph = released_by(graph, "graph.reset() of all torch.cuda.CUDAGraphs in it.");
    let mempool = MempoolId(0, 2);
    let of_mempool = released_by(
        mempool,
        "every torch.cuda.MemPool and CUDAGraph of it is deleted (MemPool(use_on_oom=True) lends it, \
         torch.cuda.use_mem_pool allocates in it).",
    );
    for (pool, words) in [(graph, of_graph), (mempool, of_mempool)] {
        for used in [0, 24] {
            let mut job = with_pool(pool, Bytes::mib(used));
            let error = job.allocate(Bytes::mib(30)).unwrap_err();
            for events in 0..=job.events.len() {
                let lines = job.shortfall(&error, events).explain(NO_HURRY).to_string();
                let free = Bytes::mib(60 - used);
                let named = format!(
                    "\nFree in live private pools, for their own requests: {free} {words}\n"
                );
                assert!(lines.contains(&named), "{events} events: {lines}");
                assert!(
                    lines.ends_with(": nothing of 8 tried."),
                    "{events} events: {lines}"
                );
            }
        }
    }
}

#[test]
fn the_pools_that_keep_the_most_are_named() {
    let mut job = Job::new("caching", Bytes::mib(200));
    for (number, mib) in [(1, 24), (2, 40), (3, 22), (4, 30), (5, 2), (6, 26)] {
        let pool = MempoolId(number, 0);
        let block = job.allocate_in(pool, Bytes::mib(mib)).unwrap();
        // The sixth pool's memory is wholly in use.
        if number < 6 {
            job.free(block);
        }
    }
    let lends = MempoolId(2, 2);
    let block = job.allocate_in(lends, Bytes::mib(26)).unwrap();
    job.free(block);
    job.allocator
        .lane_mut()
        .set_pool(lends, PoolSetting::UseOnOom(true))
        .unwrap();
    let error = job.allocate(Bytes::mib(60)).unwrap_err();
    let lines = job.shortfall(&error, 0).explain(NO_HURRY).to_string();
    let graph = "until graph.reset() of all torch.cuda.CUDAGraphs in it";
    let named = format!(
        "\nFree in live private pools, for their own requests: 40.00 MiB in pool (2, 0), {graph}; 30.00 MiB in pool \
         (4, 0), {graph}; 26.00 MiB in pool (2, 2), until every torch.cuda.MemPool and CUDAGraph of it is deleted \
         (use_on_oom=True found no block that fits); 66.00 MiB in 3 more pools.\n"
    );
    assert!(lines.contains(&named), "{lines}");
    // A pool's own memory is no obstacle to its requests.
    let own = OutOfMemory {
        pool: lends,
        ..*error.clone()
    };
    let lines = job.shortfall(&own, 0).explain(NO_HURRY).to_string();
    assert!(!lines.contains("(2, 2)"), "{lines}");
    // Memory of a pool that nothing holds any more is released before a request fails.
    job.allocator
        .lane_mut()
        .release_pool(MempoolId(4, 0))
        .unwrap();
    let error = job.allocate(Bytes::mib(90)).unwrap_err();
    let lines = job
        .shortfall(&error, usize::MAX)
        .explain(NO_HURRY)
        .to_string();
    assert!(!lines.contains("(4, 0)"), "{lines}");
}

#[test]
fn more_than_there_is_fits_nowhere() {
    let mut job = Job::new("caching", Bytes::mib(100));
    job.allocate(Bytes::mib(60)).unwrap();
    let error = job.allocate(Bytes::mib(41)).unwrap_err();
    let lines = job.shortfall(&error, 0).explain(NO_HURRY).to_string();
    assert_eq!(
        lines,
        "Reserved and not live: 0 bytes of 60.00 MiB.\n\
         Would have fitted: nothing. What is live and this request are 1.00 MiB more than the 100.00 MiB \
         there are for this process."
    );
}

/// A job without a limit collects no garbage, whatever its threshold.
#[test]
fn no_threshold_is_proposed_to_a_job_without_a_limit() {
    let (job, error) = fragmented();
    for (is_limited, others) in [(true, "5 others not"), (false, "4 others not")] {
        let shortfall = Shortfall {
            is_limited,
            ..job.shortfall(&error, usize::MAX)
        };
        let lines = shortfall.explain(NO_HURRY).to_string();
        assert!(lines.contains(others), "{lines}");
    }
}

/// A replay lends less of a pool than a job does with pages.
#[test]
fn no_strategy_with_pages_is_proposed_while_a_pool_lends() {
    let (job, error) = fragmented();
    for lends in [false, true] {
        let pool = KeptPool {
            id: MempoolId(0, 1),
            use_on_oom: lends,
        };
        let shortfall = Shortfall {
            kept_pools: vec![pool],
            ..job.shortfall(&error, usize::MAX)
        };
        let lines = shortfall.explain(NO_HURRY).to_string();
        for setting in ["expandable_segments:True", "--strategy tide"] {
            assert_eq!(lines.contains(setting), !lends, "{lines}");
        }
    }
}

/// Other settings would leave the same margin.
#[test]
fn what_a_margin_keeps_is_said_and_nothing_else_proposed() {
    let (job, error) = fragmented();
    let shortfall = Shortfall {
        kept_by_margin: Some(Bytes::mib(15)),
        ..job.shortfall(&error, usize::MAX)
    };
    let lines = shortfall.explain(NO_HURRY).to_string();
    assert_eq!(
        lines,
        "Reserved and not live: 36.00 MiB of 80.00 MiB: 36.00 MiB free between blocks of segments in use.\n\
         Would have fitted: with a lower margin. Of what is free on the device, regions leave 15.00 MiB to others \
         (lowtide_set_memory_margin, or memory_margin_bytes of torch_memory_saver)."
    );
}

#[test]
fn what_placement_has_no_part_in_is_said() {
    let mut job = Job::new("caching", Bytes::mib(100));
    job.allocate(Bytes::mib(10)).unwrap();
    let mut error = job.allocate(Bytes::mib(95)).unwrap_err();
    // The request is small enough, so the cause of its failure is not in the events.
    error.requested = Bytes::mib(20);
    let shortfall = job.shortfall(&error, usize::MAX);
    let lines = shortfall.clone().explain(NO_HURRY).to_string();
    assert!(
        lines.ends_with(
            "\nWould have fitted: not known, as a replay of all 2 events serves the request with the settings in use, \
             too: something that a replay does not know is in the way, such as a capture, a memory pool, a margin or another \
             process."
        ),
        "{lines}"
    );
    let lines = shortfall.explain(Duration::ZERO).to_string();
    assert!(
        lines.ends_with("the requests that failed before took the time there is for that."),
        "{lines}"
    );
}

#[test]
fn what_there_is_no_time_for_is_said() {
    let (job, error) = fragmented();
    let lines = job
        .shortfall(&error, 0)
        .explain(Duration::from_nanos(1))
        .to_string();
    let untried = [
        "Would have fitted: not known, as there was no time to try other settings.",
        "no time for 8 more.",
    ];
    assert!(
        untried.iter().any(|words| lines.ends_with(words)),
        "{lines}"
    );
}

#[test]
fn a_strategy_that_runs_is_not_proposed() {
    let mut job = Job::new("bfc", Bytes::mib(100));
    job.allocate(Bytes::mib(50)).unwrap();
    let error = job.allocate(Bytes::mib(51)).unwrap_err();
    let lines = job.shortfall(&error, 0).explain(NO_HURRY).to_string();
    assert!(!lines.contains(" bfc"), "{lines}");
}

proptest! {
    /// Whatever the job did, and wherever its kept events begin, they are replayed. The settings under which the
    /// request failed are never proposed.
    #[test]
    fn any_part_of_any_job_is_explained(
        operations in prop::collection::vec((1_u64..24 << 20, any::<prop::sample::Index>(), any::<bool>()), 1..200),
        kept in 0_usize..600,
    ) {
        let mut job = Job::new("caching", Bytes::mib(100));
        let mut held = Vec::new();
        for (size, which, frees) in operations {
            if frees && !held.is_empty() {
                let address = held.swap_remove(which.index(held.len()));
                job.free(address);
                continue;
            }
            match job.allocate(Bytes(size)) {
                Ok(address) => held.push(address),
                Err(error) => {
                    let shortfall = job.shortfall(&error, kept);
                    let lines = shortfall.explain(NO_HURRY).to_string();
                    prop_assert_eq!(lines.lines().count(), 2);
                    prop_assert!(!lines.contains("the settings in use ("), "{}", lines);
                    let is_replayed = !lines.contains("not known") || lines.contains(SERVES_TOO);
                    prop_assert!(is_replayed, "{}", lines);
                }
            }
        }
    }

}

proptest! {
    // Each case is eight replays, some of 16,384 events.
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// The events that a device of several streams keeps lead to its segments, however many earlier events were
    /// lost.
    #[test]
    fn the_past_that_a_device_keeps_is_replayed(
        operations in prop::collection::vec(
            (1_u64..12 << 20, any::<prop::sample::Index>(), any::<bool>(), 0_u64..3),
            1..300,
        ),
        repeats in prop_oneof![4 => Just(1), 1 => Just(60)],
        config in prop_oneof![Just("caching"), Just("caching:expandable_segments:True"), Just("bfc:retry_ms:0"), Just("slab"), Just("tide")],
    ) {
        let config: Config = config.parse().unwrap();
        let driver = SimDriver::new(SimConfig {
            capacity: Some(Bytes::mib(100)),
            ..SimConfig::default()
        });
        let allocator = SharedAllocator::new(driver, 0, &config, Arc::default(), None);
        let mut held = Vec::new();
        for (size, which, frees, stream) in operations.iter().cycle().take(operations.len() * repeats) {
            if *frees && !held.is_empty() {
                let address = held.swap_remove(which.index(held.len()));
                let used = |lane: &mut Lane<_>| lane.record_stream(address, Stream(*stream));
                allocator.with_block(address, used).unwrap();
                allocator.with_block(address, |lane| lane.free(address)).unwrap();
                continue;
            }
            match allocator.allocate(Bytes(*size), Stream(*stream), || Ok(false)) {
                Ok(address) => held.push(address),
                Err(_) if held.len() > 1 => {
                    let address = held.swap_remove(which.index(held.len()));
                    allocator.with_block(address, |lane| lane.free(address)).unwrap();
                }
                Err(error) => panic!("{error}"),
            }
        }
        let past = allocator.with_all(|device| device.recent_past()).unwrap().on_device();
        let shortfall = Shortfall {
            device: 0,
            requested: Bytes(1),
            stream: Stream(0),
            pool: MempoolId::DEFAULT,
            capacity: Bytes::mib(100),
            is_limited: true,
            kept_by_margin: None,
            free_block_order: None,
            config,
            configured: OF_ENVIRONMENT,
            segments: past.segments,
            kept_pools: past.kept,
            events: past.events,
        };
        let lines = shortfall.explain(NO_HURRY).to_string();
        // A request of one byte fits, which shows that the replay reached it.
        let is_replayed = !lines.contains("not known") || lines.contains(SERVES_TOO);
        prop_assert!(is_replayed, "{}", lines);
    }
}
