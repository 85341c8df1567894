//! Many streams at once: work queued everywhere, blocks shared between streams, captures.
//!
//! The model has its own clocks. It rejects memory that is allocated again, or released to the driver, while work
//! may still access it. Not covered: streams that are destroyed.

use lowtide_core::{
    AllocError, Bytes, Config, DeviceAddress, DeviceAllocator, MempoolId, PoolSetting, Stream,
};
use lowtide_sim::program::{CAPACITY, Op, Runner, configs, random_program};
use lowtide_sim::{Call, SimConfig, SimDriver};

const STREAMS: usize = 9;
const OPERATIONS: usize = if cfg!(miri) { 10 } else { 6_000 };
const SEEDS: u64 = if cfg!(miri) { 1 } else { 3 };

/// A random program. Every request is for another stream than the last, a third stream uses every block, and
/// streams are hundreds of microseconds behind.
fn busy_program(seed: u64) -> impl Iterator<Item = Op> {
    random_program(seed)
        .enumerate()
        .flat_map(|(index, op)| match op {
            Op::Alloc { size, pool, .. } => {
                let stream = |step: usize| Stream((index / step % STREAMS) as u64);
                let newest = u16::MAX;
                vec![
                    Op::Alloc {
                        size,
                        stream: stream(1),
                        pool,
                    },
                    Op::RecordStream {
                        index: newest,
                        stream: stream(3),
                    },
                    Op::Launch {
                        stream: stream(5),
                        ns: 300_000,
                    },
                    Op::Launch {
                        stream: stream(3),
                        ns: 100_000,
                    },
                    Op::Advance { ns: 50_000 },
                ]
            }
            op => vec![op],
        })
}

#[test]
fn busy_streams_share_blocks() {
    for config in configs() {
        for seed in 0..SEEDS {
            let mut runner = Runner::new(&config, CAPACITY);
            for (index, op) in busy_program(seed).take(OPERATIONS).enumerate() {
                let outcome = runner.apply(&op).map(drop);
                let everything = |()| {
                    if index % 97 == 0 {
                        runner.check()
                    } else {
                        Ok(())
                    }
                };
                let outcome = outcome.and_then(everything);
                assert_eq!(
                    outcome,
                    Ok(()),
                    "{config}, seed {seed}, operation {index}, {op:?}"
                );
            }
            assert_eq!(runner.finish(), Ok(()), "{config}, seed {seed}");
        }
    }
}

fn allocator(config: &Config) -> DeviceAllocator<SimDriver> {
    let capacity = Some(CAPACITY);
    DeviceAllocator::new(
        SimDriver::new(SimConfig {
            capacity,
            ..SimConfig::default()
        }),
        0,
        config,
    )
}

/// Returns the number of event queries and waits at the driver.
fn questions(allocator: &mut DeviceAllocator<SimDriver>) -> u64 {
    let mut count = |call| allocator.driver().stats(call).count;
    count(Call::QueryEvent) + count(Call::SynchronizeEvent)
}

#[test]
fn a_shared_block_is_reused_after_the_other_streams_work() -> Result<(), AllocError> {
    let mut allocator = allocator(&Config::default());
    let (own, other) = (Stream(1), Stream(2));
    let shared = allocator.allocate(Bytes::mib(4), own)?;
    allocator.lane_mut().record_stream(shared, other)?;
    allocator.driver().launch(other, 1_000_000);
    allocator.free(shared)?;

    let meanwhile = allocator.allocate(Bytes::mib(4), own)?;
    assert_ne!(meanwhile, shared);
    allocator.driver().advance(1_000_000);
    assert_eq!(allocator.allocate(Bytes::mib(4), own)?, shared);
    Ok(())
}

#[test]
fn a_busy_stream_holds_up_no_other() -> Result<(), AllocError> {
    let mut allocator = allocator(&Config::default());
    let own = Stream(1);
    let [first, second] = [
        allocator.allocate(Bytes::mib(2), own)?,
        allocator.allocate(Bytes::mib(2), own)?,
    ];
    allocator.lane_mut().record_stream(first, Stream(2))?;
    allocator.lane_mut().record_stream(second, Stream(3))?;
    allocator.driver().launch(Stream(2), u64::MAX / 4);
    allocator.free(first)?;
    allocator.free(second)?;
    assert_eq!(allocator.allocate(Bytes::mib(2), own)?, second);
    Ok(())
}

/// An event query while a stream is captured would invalidate the capture.
#[test]
fn no_event_is_asked_about_during_a_capture() -> Result<(), AllocError> {
    for config in configs() {
        let mut allocator = allocator(&config);
        let before = allocator.allocate(Bytes::mib(4), Stream(1))?;
        allocator.lane_mut().record_stream(before, Stream(2))?;
        allocator.free(before)?;
        allocator.lane_mut().capture_begin();
        let during = allocator.allocate(Bytes::mib(4), Stream(1))?;
        allocator.lane_mut().record_stream(during, Stream(2))?;
        allocator.free(during)?;
        let asked = questions(&mut allocator);
        allocator.lane_mut().process_events()?;
        allocator.empty_cache(None)?;
        let too_much = allocator.allocate(Bytes::gib(1), Stream(1));
        assert!(too_much.is_err_and(|error| error.is_out_of_memory()));
        assert_eq!(questions(&mut allocator), asked, "{config}");

        allocator.lane_mut().capture_end()?;
        allocator.empty_cache(None)?;
        assert_eq!(allocator.stats().active_bytes.all.current, 0, "{config}");
    }
    Ok(())
}

const OWN: Stream = Stream(1);

/// Returns a full device with a pending block of 18 MiB, and the block. It is in `pool`, which has `use_on_oom`
/// unless it is the default pool. A block in use lies beside it, so its segment cannot be released.
fn with_block_that_waits(
    config: &str,
    pool: MempoolId,
) -> Result<(DeviceAllocator<SimDriver>, DeviceAddress), AllocError> {
    let driver = SimDriver::new(SimConfig {
        capacity: Some(Bytes::mib(50)),
        ..SimConfig::default()
    });
    let config = config.parse().expect("a configuration");
    let mut allocator = DeviceAllocator::new(driver, 0, &config);
    let whole = allocator.allocate_in(pool, Bytes::mib(40), OWN)?;
    allocator.free(whole)?;
    allocator.allocate_in(pool, Bytes::mib(22), OWN)?;
    let waits = allocator.allocate_in(pool, Bytes::mib(18), OWN)?;
    if pool != MempoolId::DEFAULT {
        allocator
            .lane_mut()
            .set_pool(pool, PoolSetting::UseOnOom(true))?;
    }
    allocator.lane_mut().record_stream(waits, Stream(2))?;
    allocator.driver().launch(Stream(2), 1_000_000);
    allocator.free(waits)?;
    Ok((allocator, waits))
}

/// PyTorch refuses the request: pytorch#189504.
#[test]
fn what_a_wait_made_free_serves_the_request_in_a_job() -> Result<(), AllocError> {
    let in_job = Config::default().in_job().to_string();
    assert_eq!(in_job, "caching:search_after_wait:True");
    for pool in [MempoolId::DEFAULT, MempoolId(0, 1)] {
        let (mut allocator, waits) = with_block_that_waits(&in_job, pool)?;
        assert_eq!(allocator.allocate(Bytes::mib(18), OWN)?, waits, "{pool}");
        for as_pytorch in ["caching", "caching:search_after_wait:False"] {
            let (mut allocator, _) = with_block_that_waits(as_pytorch, pool)?;
            let refused = allocator.allocate(Bytes::mib(18), OWN).unwrap_err();
            assert!(refused.is_out_of_memory(), "{refused}");
            // The next request finds the block.
            allocator.allocate(Bytes::mib(18), OWN)?;
        }
    }
    let as_pytorch: Config = "caching:search_after_wait:False".parse().unwrap();
    assert_eq!(as_pytorch.clone().in_job(), as_pytorch, "an option decides");
    Ok(())
}

/// The placement is PyTorch's, except for requests that PyTorch would refuse.
#[test]
fn new_memory_comes_before_what_a_wait_made_free() -> Result<(), AllocError> {
    let in_job = Config::default().in_job().to_string();
    let (mut allocator, waits) = with_block_that_waits(&in_job, MempoolId::DEFAULT)?;
    let cached = allocator.allocate(Bytes::mib(10), Stream(3))?;
    allocator.free(cached)?;
    // The wait also releases the other stream's segment.
    assert_ne!(allocator.allocate(Bytes::mib(10), OWN)?, waits);
    Ok(())
}
