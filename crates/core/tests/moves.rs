//! Which idle memory `tide` moves, and how often.

use lowtide_core::{
    AllocError, Bytes, CheckLevel, DeviceAddress, DeviceAllocator, MempoolId, Stream,
};
use proptest::prelude::Rng as _;
use proptest::test_runner::{RngAlgorithm, TestRng};

use lowtide_sim::{Call, SimConfig, SimDriver};

type Outcome = Result<(), AllocError>;

const SIZE: Bytes = Bytes::mib(8);
const KEPT: Stream = Stream(1);
const OTHER: Stream = Stream(2);

/// Returns an allocator on a device where one stream exists for ever.
fn tide() -> DeviceAllocator<SimDriver> {
    tide_on(SimConfig::default())
}

fn tide_on(config: SimConfig) -> DeviceAllocator<SimDriver> {
    let mut driver = SimDriver::new(config);
    driver.keep_stream(KEPT);
    DeviceAllocator::new(driver, 0, &"tide".parse().expect("the strategy exists"))
}

fn reserved(allocator: &DeviceAllocator<SimDriver>) -> Bytes {
    allocator.stats().reserved()
}

/// Returns how much new memory a request gets after a block of a stream was freed, with work of `ns` queued there.
fn grown_after(freed: Stream, ns: u64) -> Result<Bytes, AllocError> {
    let mut allocator = tide();
    let block = allocator.allocate(SIZE, freed)?;
    allocator.driver().launch(freed, ns);
    allocator.free(block)?;
    let before = reserved(&allocator);
    allocator.allocate(SIZE, Stream::DEFAULT)?;
    Ok(reserved(&allocator) - before)
}

#[test]
fn a_stream_that_exists_for_ever_is_asked_what_is_done() -> Outcome {
    assert_eq!(grown_after(KEPT, 0)?, Bytes::ZERO);
    assert_eq!(grown_after(KEPT, 1_000_000_000)?, SIZE, "its work runs");
    assert_eq!(grown_after(OTHER, 0)?, SIZE, "it may be gone");
    Ok(())
}

/// The wait before the error would break the capture.
#[test]
fn a_request_in_a_capture_that_nobody_announced_fails_without_a_wait() -> Outcome {
    let mut allocator = tide();
    let block = allocator.allocate(SIZE, OTHER)?;
    allocator.set_limit(Some(SIZE));
    assert!(allocator.driver().begin_capture(OTHER));
    let refused = allocator.allocate(SIZE, OTHER);
    assert!(refused.is_err_and(|error| error.is_out_of_memory()));
    assert_eq!(allocator.driver().violations(), [""; 0]);
    assert!(allocator.driver().end_capture(OTHER));
    allocator.free(block)
}

/// A library may capture a stream without telling the allocator. Questions about events, and a wait, would break it.
#[test]
fn a_captured_stream_that_exists_for_ever_keeps_its_memory() -> Outcome {
    let mut allocator = tide();
    let block = allocator.allocate(SIZE, KEPT)?;
    assert!(allocator.driver().begin_capture(KEPT));
    allocator.free(block)?;
    allocator.allocate(SIZE, OTHER)?;
    assert_eq!(reserved(&allocator), SIZE + SIZE);
    allocator.set_limit(Some(SIZE + SIZE));
    let refused = allocator.allocate(SIZE, OTHER);
    assert!(refused.is_err_and(|error| error.is_out_of_memory()));
    allocator.lane_mut().release_unused(u64::MAX, SIZE)?;
    assert_eq!(reserved(&allocator), SIZE + SIZE);
    assert_eq!(allocator.driver().violations(), [""; 0]);
    assert!(allocator.driver().end_capture(KEPT));
    allocator.allocate(SIZE, OTHER)?;
    assert_eq!(reserved(&allocator), SIZE + SIZE);
    Ok(())
}

#[test]
fn a_large_request_gets_what_is_idle_before_new_memory() -> Outcome {
    let mut allocator = tide();
    let block = allocator.allocate(Bytes::gib(5), KEPT)?;
    allocator.free(block)?;
    allocator.allocate(Bytes::gib(17), Stream::DEFAULT)?;
    assert_eq!(reserved(&allocator), Bytes::gib(17));
    Ok(())
}

/// However many there are, a request that succeeds may then move frames.
#[test]
fn requests_that_fail_move_nothing() -> Outcome {
    let mut allocator = tide();
    let large = Bytes::mib(80);
    allocator.allocate(large, Stream::DEFAULT)?;
    let block = allocator.allocate(SIZE, KEPT)?;
    allocator.free(block)?;
    allocator.set_limit(Some(large + SIZE + SIZE));
    for _ in 0..4000 {
        let refused = allocator.allocate(SIZE + SIZE + SIZE, Stream::DEFAULT);
        assert!(refused.is_err_and(|error| error.is_out_of_memory()));
    }
    allocator.allocate(SIZE, Stream::DEFAULT)?;
    assert_eq!(reserved(&allocator), large + SIZE);
    Ok(())
}

/// What another pool has idle is unmapped only if the request then succeeds.
#[test]
fn a_request_of_a_private_pool_that_fails_leaves_idle_memory_where_it_is() -> Outcome {
    let mut allocator = tide();
    let block = allocator.allocate(SIZE, Stream::DEFAULT)?;
    allocator.free(block)?;
    allocator.set_limit(Some(SIZE + SIZE));
    let pool = MempoolId(1, 0);
    let refused = allocator.allocate_in(pool, SIZE + SIZE + SIZE, Stream::DEFAULT);
    assert!(refused.is_err_and(|error| error.is_out_of_memory()));
    assert_eq!(allocator.driver().stats(Call::Unmap).count, 0);
    allocator.allocate_in(pool, SIZE, Stream::DEFAULT)?;
    assert_eq!(reserved(&allocator), SIZE);
    Ok(())
}

/// A server may use a stream for each request. A frame has too few views for all of them.
#[test]
fn streams_that_take_turns_share_memory() -> Outcome {
    let mut driver = SimDriver::new(SimConfig::default());
    let streams = (1..33).map(Stream);
    streams
        .clone()
        .for_each(|stream| driver.keep_stream(stream));
    let mut allocator = DeviceAllocator::new(driver, 0, &"tide".parse().expect("it exists"));
    for stream in streams.cycle().take(500) {
        let blocks: Result<Vec<_>, AllocError> = (0..16)
            .map(|_| allocator.allocate(Bytes::mib(64), stream))
            .collect();
        allocator.driver().advance(1_000_000);
        for block in blocks? {
            allocator.free(block)?;
        }
    }
    assert!(reserved(&allocator) <= Bytes::mib(1280));
    Ok(())
}

/// The frames at both ends of a free block serve elsewhere, and queued work may still use their addresses. Between them, the
/// block has memory for a large request.
#[test]
fn a_large_request_finds_what_is_idle_inside_a_free_block() -> Outcome {
    let mut allocator = tide();
    let mut allocate = |mib| allocator.allocate(Bytes::mib(mib), Stream::DEFAULT);
    let (start, inside, end) = (allocate(4)?, allocate(224)?, allocate(4)?);
    let (_kept, other, _last) = (allocate(2)?, allocate(240)?, allocate(2)?);
    allocator.driver().launch(Stream::DEFAULT, 1_000_000_000);
    for block in [start, end, other, inside] {
        allocator.free(block)?;
    }
    allocator.allocate(Bytes::mib(242), Stream::DEFAULT)?;
    let maps =
        |allocator: &mut DeviceAllocator<SimDriver>| allocator.driver().stats(Call::Map).count;
    let before = maps(&mut allocator);
    let found = allocator.allocate(Bytes::mib(160), Stream::DEFAULT)?;
    assert_eq!(found, inside);
    assert_eq!(maps(&mut allocator), before);
    Ok(())
}

/// One free block ends with memory and the next begins with some, but neither has enough of it in one piece.
#[test]
fn a_large_request_gets_no_window_over_two_free_blocks() -> Outcome {
    let mut allocator = tide();
    let mut allocate = |mib| allocator.allocate(Bytes::mib(mib), Stream::DEFAULT);
    let (start, before, _kept) = (allocate(140)?, allocate(100)?, allocate(2)?);
    let (behind, end, last) = (allocate(100)?, allocate(150)?, allocate(2)?);
    allocator.driver().launch(Stream::DEFAULT, 1_000_000_000);
    for block in [start, end] {
        allocator.free(block)?;
    }
    // Takes the frames of both. Queued work may still use their addresses.
    allocator.allocate(Bytes::mib(290), Stream::DEFAULT)?;
    for block in [before, behind] {
        allocator.free(block)?;
    }
    let found = allocator.allocate(Bytes::mib(160), Stream::DEFAULT)?;
    assert!(found < start || found > last, "{found}");
    let checked = allocator.lane().check_invariants(CheckLevel::Everything);
    assert_eq!(checked, Ok(()));
    Ok(())
}

/// A job that holds blocks of random sizes, 1 GiB at most.
struct RandomJob {
    allocator: DeviceAllocator<SimDriver>,
    blocks: Vec<DeviceAddress>,
    random: TestRng,
}

impl RandomJob {
    const LIVE: Bytes = Bytes::gib(1);

    fn new(allocator: DeviceAllocator<SimDriver>) -> RandomJob {
        RandomJob {
            allocator,
            blocks: Vec::new(),
            random: TestRng::deterministic_rng(RngAlgorithm::ChaCha),
        }
    }

    fn below(&mut self, end: u64) -> u64 {
        self.random.next_u64() % end
    }

    /// Makes requests, each so many nanoseconds after the one before. Returns the number of driver calls that unmapped
    /// views.
    fn run(&mut self, requests: usize, apart_ns: u64) -> Result<u64, AllocError> {
        let unmaps = |job: &mut RandomJob| job.allocator.driver().stats(Call::Unmap).count;
        let before = unmaps(self);
        for _ in 0..requests {
            let most = 1 << (10 + self.below(16));
            let size = Bytes(most / 2 + self.below(most / 2));
            while self.allocator.stats().allocated() + size > RandomJob::LIVE {
                let index = self.below(self.blocks.len() as u64);
                let index = usize::try_from(index).expect("it is an index");
                self.allocator.free(self.blocks.swap_remove(index))?;
            }
            self.allocator.driver().advance(apart_ns);
            let block = self.allocator.allocate(size, Stream::DEFAULT)?;
            self.blocks.push(block);
        }
        Ok(unmaps(self) - before)
    }
}

/// Frames move as often as a limit demands, or as a slow job does not notice.
#[test]
fn requests_of_random_sizes_that_follow_fast_get_more_memory_where_there_is_some() -> Outcome {
    const FAST: u64 = 10_000;
    const SLOW: u64 = 10_000_000;
    let limit = Bytes(RandomJob::LIVE.get() / 100 * 112);
    let mut unmaps = Vec::new();
    let mut reserved = Vec::new();
    for (limit, apart_ns) in [(None, FAST), (None, SLOW), (Some(limit), FAST)] {
        let mut allocator = tide();
        allocator.set_limit(limit);
        let mut job = RandomJob::new(allocator);
        job.run(50_000, apart_ns)?;
        unmaps.push(job.run(20_000, apart_ns)?);
        reserved.push(job.allocator.stats().reserved());
    }
    assert!(unmaps[0] * 5 < unmaps[1].min(unmaps[2]), "{unmaps:?}");
    assert!(reserved[1] <= limit && limit < reserved[0], "{reserved:?}");
    Ok(())
}

#[test]
fn some_of_the_device_is_left_to_other_programs() -> Outcome {
    let capacity = Bytes(RandomJob::LIVE.get() / 100 * 120);
    let mut job = RandomJob::new(tide_on(SimConfig {
        capacity: Some(capacity),
        ..SimConfig::default()
    }));
    job.run(70_000, 10_000)?;
    let left = capacity - reserved(&job.allocator);
    assert!(left >= Bytes(capacity.get() / 32), "{left}");
    Ok(())
}
