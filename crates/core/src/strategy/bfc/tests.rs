use proptest::prelude::*;

use super::options::BfcConfig;
use crate::check::CheckLevel;
use crate::config::Config;
use crate::device::DeviceAllocator;
use crate::driver::{Driver, DriverError};
use crate::error::AllocError;
use crate::event::Action;
use crate::lane::Found;
use crate::snapshot::{BlockSnapshot, BlockStatus};
use crate::strategy::test_driver::{TestDriver, programs, run};
use crate::units::{Bytes, DeviceAddress, Stream};

type Allocator = DeviceAllocator<TestDriver>;

const MIB: u64 = 1 << 20;

fn allocator(driver: TestDriver, conf: &str) -> Allocator {
    DeviceAllocator::new(driver, 0, &Config::parse("bfc", conf).unwrap())
}

/// Returns an allocator whose first region has `mib` MiB.
fn with_region(mib: u64) -> Allocator {
    with_region_and(mib, "")
}

fn with_region_and(mib: u64, conf: &str) -> Allocator {
    let driver = TestDriver::new(Bytes::gib(64));
    allocator(driver, &format!("initial_region_mb:{mib},{conf}"))
}

/// Returns a device whose allocations are not adjacent.
fn scattered(capacity: Bytes) -> TestDriver {
    let mut driver = TestDriver::new(capacity);
    driver.gap = Bytes::mib(2);
    driver
}

fn allocate(allocator: &mut Allocator, size: u64) -> DeviceAddress {
    let address = allocator.allocate(Bytes(size), Stream::DEFAULT).unwrap();
    check(allocator);
    address
}

fn free(allocator: &mut Allocator, address: DeviceAddress) {
    allocator.free(address).unwrap();
    check(allocator);
}

fn check(allocator: &Allocator) {
    allocator
        .lane()
        .check_invariants(CheckLevel::Everything)
        .unwrap();
}

/// Returns the number of free chunks in all regions.
fn free_chunks(allocator: &mut Allocator) -> usize {
    let regions = allocator.segments();
    let chunks = regions.iter().flat_map(|region| &region.blocks);
    let is_free = |chunk: &&BlockSnapshot| chunk.status == BlockStatus::Inactive;
    chunks.filter(is_free).count()
}

fn size_of(allocator: &Allocator, address: DeviceAddress) -> u64 {
    allocator.lane().allocation(address).unwrap().size.get()
}

/// Returns the sizes of the regions at the driver in MiB, ordered by address.
fn held(allocator: &mut Allocator) -> Vec<u64> {
    let held = allocator.driver().held.values();
    held.map(|size| size.get() / MIB).collect()
}

fn failure() -> DriverError {
    DriverError::Failed {
        call: "told to fail",
        code: 1,
        message: String::new(),
    }
}

#[test]
fn requests_are_rounded_to_256_bytes() {
    let mut allocator = with_region(2);
    let first = allocate(&mut allocator, 1);
    let second = allocate(&mut allocator, 257);
    assert_eq!(second, first + Bytes(256));
    assert_eq!(size_of(&allocator, second), 512);
}

/// The rest is split off if the chunk is at least twice the request, or if the rest is at least the allowed
/// waste.
#[test]
fn chunks_are_split_at_the_edges_of_the_rule() {
    // Makes a hole of `hole` bytes between two blocks and allocates from it.
    let taken = |conf: &str, hole: u64, request: u64| {
        let driver = TestDriver::new(Bytes::gib(2));
        let mut allocator = allocator(driver, &format!("initial_region_mb:768{conf}"));
        // The memory behind the hole is too small for the request.
        allocator.set_limit(Some(Bytes::mib(768)));
        let block = allocate(&mut allocator, hole);
        allocate(&mut allocator, 256);
        assert_eq!(size_of(&allocator, block), hole);
        free(&mut allocator, block);
        let again = allocate(&mut allocator, request);
        assert_eq!(again, block);
        size_of(&allocator, again)
    };
    assert_eq!(taken("", 4096, 2048), 2048);
    assert_eq!(taken("", 4096, 2049), 4096);
    let large = 400 * MIB;
    assert_eq!(
        taken("", large + 128 * MIB, large),
        large,
        "128 MiB are too much to waste"
    );
    assert_eq!(
        taken("", large + 128 * MIB - 256, large),
        large + 128 * MIB - 256,
        "less is not"
    );
    let fraction = ",fragmentation_fraction:0.125";
    assert_eq!(taken(fraction, large + 96 * MIB, large), large);
    assert_eq!(
        taken(fraction, large + 96 * MIB - 256, large),
        large + 96 * MIB - 256
    );
}

#[test]
fn the_smallest_chunk_that_fits_is_taken_and_of_equal_ones_the_lowest() {
    let mut allocator = with_region(2);
    let sizes = [4096, 3072, 2560, 3072, 2560];
    let holes = sizes.map(|size| {
        let hole = allocate(&mut allocator, size);
        allocate(&mut allocator, 256);
        hole
    });
    for hole in [holes[4], holes[3], holes[0], holes[2], holes[1]] {
        free(&mut allocator, hole);
    }
    let taken = [2500; 5].map(|size| allocate(&mut allocator, size));
    assert_eq!(taken, [2, 4, 1, 3, 0].map(|index: usize| holes[index]));
}

#[test]
fn a_freed_chunk_merges_with_both_neighbours() {
    let mut allocator = with_region(2);
    let blocks = [1024, 2048, 4096, 512].map(|size| allocate(&mut allocator, size));
    free(&mut allocator, blocks[0]);
    free(&mut allocator, blocks[2]);
    assert_eq!(free_chunks(&mut allocator), 3);
    free(&mut allocator, blocks[1]);
    assert_eq!(free_chunks(&mut allocator), 2);
    assert_eq!(allocate(&mut allocator, 1024 + 2048 + 4096), blocks[0]);
    assert_eq!(free_chunks(&mut allocator), 1);
}

#[test]
fn regions_double_and_do_not_join() {
    let mut allocator = with_region(2);
    let first = allocate(&mut allocator, 2 * MIB);
    let second = allocate(&mut allocator, 4 * MIB);
    assert_eq!(held(&mut allocator), [2, 4]);
    assert_eq!(allocator.stats().segment.all.current, 2);

    // Each region is twice the last size, and doubled further until the request fits.
    allocate(&mut allocator, 256);
    assert_eq!(held(&mut allocator), [2, 4, 8]);
    allocate(&mut allocator, 40 * MIB);
    assert_eq!(held(&mut allocator), [2, 4, 8, 64]);

    // The regions are adjacent, but no chunk lies in both, because CUDA refuses to fill such a chunk.
    assert_eq!(second, first + Bytes::mib(2));
    free(&mut allocator, first);
    free(&mut allocator, second);
    let other = allocate(&mut allocator, 6 * MIB);
    assert!(![first, second].contains(&other));
}

#[test]
fn regions_of_different_streams_stay_apart() {
    let mut allocator = with_region(2);
    let mut on = |stream| allocator.allocate(Bytes::mib(2), Stream(stream)).unwrap();
    let first = on(0);
    assert_eq!(on(1), first + Bytes::mib(2), "adjacent");
    check(&allocator);
    assert_eq!(allocator.stats().segment.all.current, 2);
}

#[test]
fn a_refused_region_is_asked_for_again_smaller() {
    let mut allocator = allocator(TestDriver::new(Bytes::mib(80)), "initial_region_mb:64");
    allocate(&mut allocator, 64 * MIB);
    // 16 MiB of the device remain, so the limit reduces the next region from 128 MiB.
    allocate(&mut allocator, MIB);
    assert_eq!(held(&mut allocator), [64, 16]);

    let mut allocator = with_region(100);
    allocator.driver().capacity = Bytes::mib(80);
    allocator.set_limit(Some(Bytes::mib(1000)));
    allocate(&mut allocator, MIB);
    // 100, 90, 81 and 72.9 MiB; the driver rounds to 2 MiB.
    assert_eq!(allocator.driver().calls, 4);
    assert_eq!(held(&mut allocator), [74]);
}

#[test]
fn a_region_is_never_asked_to_be_smaller_than_the_request() {
    let mut allocator = with_region(100);
    allocator.driver().capacity = Bytes::mib(80);
    allocator.set_limit(Some(Bytes::mib(1000)));
    let error = allocator.allocate(Bytes::mib(85), Stream::DEFAULT);
    assert!(error.unwrap_err().is_out_of_memory());
    // 100 and 90 MiB, before and after cached memory is released. Nothing is cached.
    assert_eq!(allocator.driver().calls, 4);
    check(&allocator);
}

#[test]
fn a_driver_that_refuses_everything_ends_the_search_for_small_requests_too() {
    let mut allocator = with_region(2);
    allocator.driver().capacity = Bytes::ZERO;
    allocator.set_limit(Some(Bytes::gib(1)));
    let error = allocator.allocate(Bytes(1), Stream::DEFAULT);
    assert!(error.unwrap_err().is_out_of_memory());
}

#[test]
fn without_growth_one_region_takes_everything_the_device_has() {
    let mut allocator = allocator(TestDriver::new(Bytes::mib(100)), "allow_growth:False");
    allocator.driver().allocate(Bytes::mib(20)).unwrap();
    allocate(&mut allocator, MIB);
    assert_eq!(allocator.stats().reserved(), Bytes::mib(80));
    allocate(&mut allocator, 79 * MIB);
    assert_eq!(allocator.stats().num_device_alloc, 1);
    let error = allocator.allocate(Bytes(1), Stream::DEFAULT);
    assert!(error.unwrap_err().is_out_of_memory());
}

#[test]
fn without_growth_a_limit_bounds_the_one_region() {
    let mut allocator = allocator(TestDriver::new(Bytes::gib(80)), "allow_growth:False");
    allocator.set_limit(Some(Bytes::mib(30)));
    allocate(&mut allocator, MIB);
    assert_eq!(held(&mut allocator), [30]);
}

#[test]
fn free_regions_go_back_before_a_request_fails() {
    let mut allocator = allocator(scattered(Bytes::mib(14)), "");
    let blocks = [2, 4, 8].map(|mib| allocate(&mut allocator, mib * MIB));
    free(&mut allocator, blocks[0]);
    free(&mut allocator, blocks[1]);
    allocate(&mut allocator, 6 * MIB);
    assert_eq!(held(&mut allocator), [8, 6]);
}

#[test]
fn free_regions_stay_where_giving_them_back_cannot_help() {
    let mut allocator = allocator(scattered(Bytes::mib(14)), "");
    let blocks = [2, 4, 8].map(|mib| allocate(&mut allocator, mib * MIB));
    free(&mut allocator, blocks[0]);
    let error = allocator.allocate(Bytes::mib(3), Stream::DEFAULT);
    assert!(error.unwrap_err().is_out_of_memory());
    assert_eq!(held(&mut allocator), [2, 4, 8]);
    check(&allocator);
}

#[test]
fn a_limit_may_be_as_large_as_it_likes() {
    let mut allocator = allocator(scattered(Bytes::mib(14)), "");
    allocator.set_limit(Some(Bytes(u64::MAX)));
    let blocks = [2, 4, 8].map(|mib| allocate(&mut allocator, mib * MIB));
    free(&mut allocator, blocks[0]);
    free(&mut allocator, blocks[1]);
    let size = Bytes::mib(5);
    assert!(allocator.allocate(size, Stream::DEFAULT).is_ok());
    check(&allocator);
}

#[test]
fn without_garbage_collection_free_regions_go_back_only_when_told() {
    let mut allocator = allocator(scattered(Bytes::mib(14)), "garbage_collection:False");
    let blocks = [2, 4, 8].map(|mib| allocate(&mut allocator, mib * MIB));
    free(&mut allocator, blocks[0]);
    free(&mut allocator, blocks[1]);
    let error = allocator.allocate(Bytes::mib(6), Stream::DEFAULT);
    assert!(error.unwrap_err().is_out_of_memory());
    assert_eq!(held(&mut allocator), [2, 4, 8]);
    allocator.empty_cache(None).unwrap();
    assert_eq!(held(&mut allocator), [8]);
    check(&allocator);
}

#[test]
fn each_region_goes_back_by_itself() {
    let mut allocator = with_region(2);
    allocator.lane_mut().event_log().record(true);
    let blocks = [2, 4].map(|mib| allocate(&mut allocator, mib * MIB));
    for block in blocks {
        free(&mut allocator, block);
    }
    allocator.empty_cache(None).unwrap();
    check(&allocator);
    // The driver checks addresses and sizes.
    assert_eq!(held(&mut allocator), [0; 0]);
    assert_eq!(allocator.stats().segment.all.current, 0);
    let went_back = allocator.lane_mut().event_log().take();
    let went_back = went_back.filter(|event| event.action == Action::SegmentFree);
    let went_back: Vec<_> = went_back.map(|event| (event.address, event.size)).collect();
    assert_eq!(
        went_back,
        [(blocks[0], Bytes::mib(2)), (blocks[1], Bytes::mib(4))]
    );
}

#[test]
fn what_the_driver_does_not_take_back_stays_a_region() {
    let mut allocator = with_region(2);
    let blocks = [2, 4, 8].map(|mib| allocate(&mut allocator, mib * MIB));
    for block in blocks {
        free(&mut allocator, block);
    }
    let calls = allocator.driver().calls;
    allocator.driver().failure = Some((calls + 1, failure()));
    assert_eq!(
        allocator.empty_cache(None),
        Err(AllocError::Driver(failure())),
        "2 MiB went back, the 4 MiB did not"
    );
    check(&allocator);
    assert_eq!(held(&mut allocator), [4, 8]);
    assert_eq!(allocator.stats().segment.all.current, 2);
    assert_eq!(allocate(&mut allocator, 4 * MIB), blocks[1]);
    free(&mut allocator, blocks[1]);
    allocator.empty_cache(None).unwrap();
    assert_eq!(held(&mut allocator), [0; 0]);
}

/// Otherwise the next region would double in each round in which the driver refuses one, up to all of the device.
#[test]
fn regions_double_from_what_is_left_where_the_driver_refuses_one() {
    let mut allocator = with_region(2);
    for _ in 0..4 {
        let block = allocate(&mut allocator, 100);
        assert_eq!(held(&mut allocator).last(), Some(&2));
        free(&mut allocator, block);
        // A region of another stream. The driver refuses to free it.
        let other = allocator.allocate(Bytes(100), Stream(7)).unwrap();
        free(&mut allocator, other);
        let calls = allocator.driver().calls;
        allocator.driver().failure = Some((calls + 1, failure()));
        assert!(allocator.empty_cache(None).is_err());
        assert_eq!(held(&mut allocator), [2], "one went back");
        check(&allocator);
    }
}

#[test]
fn a_driver_failure_changes_nothing() {
    let mut allocator = with_region(2);
    allocate(&mut allocator, 2 * MIB);
    let calls = allocator.driver().calls;
    allocator.driver().failure = Some((calls, failure()));
    let error = allocator.allocate(Bytes::mib(100), Stream::DEFAULT);
    assert_eq!(error, Err(AllocError::Driver(failure())));
    check(&allocator);
    allocate(&mut allocator, MIB);
    assert_eq!(
        held(&mut allocator),
        [2, 4],
        "the next region is as large as it would have been"
    );
}

#[test]
fn chunks_that_the_frontier_has_not_passed_are_used_but_not_merged() {
    let mut allocator = with_region_and(2, "safe_frontier_lag:3");
    let blocks = [4096; 5].map(|size| allocate(&mut allocator, size));
    let behind = blocks[4] + Bytes(4096);
    free(&mut allocator, blocks[0]);
    free(&mut allocator, blocks[1]);
    let two = allocate(&mut allocator, 8192);
    assert_eq!(two, behind, "two neighbours do not make one chunk");
    let one = allocate(&mut allocator, 4096);
    assert_eq!(one, blocks[0], "one is used as it is");
    check(&allocator);
    // The count is 5: the frontier has passed the second free, but not the third.
    for block in [blocks[0], blocks[2], blocks[3]] {
        free(&mut allocator, block);
    }
    check(&allocator);
    assert_eq!(free_chunks(&mut allocator), 5);
    // With each free the frontier passes one more.
    free(&mut allocator, two);
    free(&mut allocator, blocks[4]);
    check(&allocator);
    assert_eq!(allocate(&mut allocator, 3 * 4096), blocks[0]);
}

#[test]
fn with_no_lag_chunks_are_merged_at_once() {
    for conf in ["", "safe_frontier_lag:0"] {
        let mut allocator = with_region_and(2, conf);
        let blocks = [4096; 3].map(|size| allocate(&mut allocator, size));
        free(&mut allocator, blocks[0]);
        free(&mut allocator, blocks[1]);
        check(&allocator);
        assert_eq!(allocate(&mut allocator, 8192), blocks[0], "{conf}");
    }
}

/// The rest of a chunk has the count of the chunk's free.
#[test]
fn the_rest_of_a_recent_chunk_is_as_recent() {
    let mut allocator = with_region_and(2, "safe_frontier_lag:2");
    let all = allocate(&mut allocator, 2 * MIB);
    let others = [256; 2].map(|size| allocate(&mut allocator, size));
    free(&mut allocator, all);
    let front = allocate(&mut allocator, MIB);
    assert_eq!(front, all);
    free(&mut allocator, front);
    check(&allocator);
    let whole = allocate(&mut allocator, 2 * MIB);
    assert_ne!(whole, all, "the halves are not one chunk yet");
    for other in others {
        free(&mut allocator, other);
    }
    check(&allocator);
    assert_eq!(allocate(&mut allocator, 2 * MIB), all, "both halves again");
}

#[test]
fn recent_chunks_are_merged_before_a_request_fails() {
    let conf = "garbage_collection:False,safe_frontier_lag:100";
    let mut allocator = allocator(TestDriver::new(Bytes::mib(2)), conf);
    let blocks = [MIB / 2; 4].map(|size| allocate(&mut allocator, size));
    for block in blocks {
        free(&mut allocator, block);
    }
    assert_eq!(allocate(&mut allocator, MIB), blocks[0]);
    // Only the chunks that were needed were merged: the other two are unchanged.
    assert_eq!(allocate(&mut allocator, MIB / 2), blocks[2]);
}

#[test]
fn a_region_of_recent_chunks_goes_back() {
    let mut allocator = with_region_and(2, "safe_frontier_lag:100");
    for block in [MIB; 2].map(|size| allocate(&mut allocator, size)) {
        free(&mut allocator, block);
    }
    allocator.empty_cache(None).unwrap();
    check(&allocator);
    assert_eq!(held(&mut allocator), [0; 0]);
}

#[test]
fn the_wait_is_what_is_configured() {
    let wait = |conf| Config::parse("bfc", conf).unwrap().retry_wait_ms();
    assert_eq!(wait(""), Some(10_000));
    assert_eq!(wait("retry_ms:5"), Some(5));
    assert_eq!(wait("allow_retry_on_failure:False"), None);
    assert_eq!(Config::default().retry_wait_ms(), None);
}

#[test]
fn a_failed_try_leaves_no_trace_in_the_figures() {
    let mut allocator = allocator(TestDriver::new(Bytes::mib(2)), "");
    allocator.lane_mut().event_log().record(true);
    let attempt = |allocator: &mut DeviceAllocator<_>, mib| {
        let found = allocator
            .lane_mut()
            .allocate(Bytes::mib(mib), Stream::DEFAULT)?;
        let Found::Nothing(request) = found else {
            panic!("nothing is free: {found:?}");
        };
        allocator.serve_miss(0, &request, true)
    };
    assert_eq!(attempt(&mut allocator, 3), Ok(None));
    assert_eq!(allocator.stats().num_ooms, 0);
    assert_eq!(allocator.lane_mut().event_log().take().count(), 0);
    let found = attempt(&mut allocator, 2);
    let held = allocator.driver().held.keys().next().copied();
    assert!(held.is_some() && found == Ok(held));
}

#[test]
fn running_out_of_memory_is_explained() {
    let mut allocator = allocator(scattered(Bytes::mib(14)), "");
    let kept = [(MIB, 1), (MIB / 4, 3), (300, 2)];
    for (size, count) in kept {
        for _ in 0..count {
            allocate(&mut allocator, size);
        }
    }
    let hole = allocate(&mut allocator, 2 * MIB);
    allocate(&mut allocator, MIB / 2);
    free(&mut allocator, hole);
    allocator.allocate(Bytes::mib(8), Stream(7)).unwrap();
    let error = allocator.allocate(Bytes::mib(5), Stream::DEFAULT);
    let Err(AllocError::OutOfMemory(error)) = error else {
        panic!("{error:?}");
    };
    assert_eq!(error.largest_free, Bytes::mib(2));
    let address = *allocator.driver().held.keys().next().unwrap();
    let at = |mib| address + Bytes::mib(mib);
    let (first, second, third) = (at(0), at(4), at(10));
    let expected = format!(
        "\
Bins, by the smallest chunk that each may hold:
  1 (512 bytes): 2 chunks of 1.00 KiB, 2 of them in use with 1.00 KiB, 600 bytes requested
  9 (128.00 KiB): 1 chunks of 255.00 KiB, 0 of them in use with 0 bytes, 0 bytes requested
  10 (256.00 KiB): 3 chunks of 768.00 KiB, 3 of them in use with 768.00 KiB, 768.00 KiB requested
  11 (512.00 KiB): 1 chunks of 512.00 KiB, 1 of them in use with 512.00 KiB, 512.00 KiB requested
  12 (1.00 MiB): 2 chunks of 2.50 MiB, 1 of them in use with 1.00 MiB, 1.00 MiB requested
  13 (2.00 MiB): 1 chunks of 2.00 MiB, 0 of them in use with 0 bytes, 0 bytes requested
  15 (8.00 MiB): 1 chunks of 8.00 MiB, 1 of them in use with 8.00 MiB, 8.00 MiB requested
Chunks in use, by size:
  1 x 8.00 MiB = 8.00 MiB
  1 x 1.00 MiB = 1.00 MiB
  3 x 256.00 KiB = 768.00 KiB
  1 x 512.00 KiB = 512.00 KiB
  2 x 512 bytes = 1.00 KiB
The largest free chunk that the request may use has 2.00 MiB; it needs 5.00 MiB, from bin 14.
Regions (# in use, + in part, . free):
  [{}] 8.00 MiB at {third}, stream 7, pool (0, 0)
  [{}{}{}] 4.00 MiB at {second}, stream 0, pool (0, 0)
  [{}+{}] 2.00 MiB at {first}, stream 0, pool (0, 0)
",
        "#".repeat(64),
        ".".repeat(32),
        "#".repeat(8),
        ".".repeat(24),
        "#".repeat(56),
        ".".repeat(7),
    );
    assert_eq!(error.details, expected);
}

#[test]
fn the_explanation_of_a_fragmented_heap_is_bounded() {
    let mut allocator = allocator(scattered(Bytes::mib(400)), "initial_region_mb:2");
    // One stream per block, so that there are many regions and sizes.
    for stream in 0..40 {
        let size = Bytes::kib(500 + stream);
        allocator.allocate(size, Stream(stream)).unwrap();
    }
    let error = allocator.allocate(Bytes::gib(1), Stream::DEFAULT);
    let Err(AllocError::OutOfMemory(error)) = error else {
        panic!("{error:?}");
    };
    assert!(error.details.contains("  and 24 more sizes\n"));
    assert!(error.details.contains("  and 24 more regions\n"));
    assert!(error.details.lines().count() < 64);
}

/// The reference: BFC with one list of chunks, searched from end to end.
struct Naive {
    /// Sorted by address.
    chunks: Vec<NaiveChunk>,
    next_region_size: u64,
    next_address: u64,
}

#[derive(Clone, Copy)]
struct NaiveChunk {
    address: u64,
    size: u64,
    free: bool,
    /// Chunks are not merged across the start of a region.
    starts_region: bool,
}

impl Naive {
    fn allocate(&mut self, requested: u64) -> u64 {
        let size = requested.div_ceil(256) * 256;
        let fits = |chunk: &NaiveChunk| chunk.free && chunk.size >= size;
        if !self.chunks.iter().any(fits) {
            self.extend(size);
        }
        let fitting = (0..self.chunks.len()).filter(|&index| fits(&self.chunks[index]));
        let best = fitting
            .min_by_key(|&index| (self.chunks[index].size, self.chunks[index].address))
            .unwrap();
        let rest = self.chunks[best].size - size;
        if rest > 0 && (rest >= size || rest >= 128 * MIB) {
            let rest = NaiveChunk {
                address: self.chunks[best].address + size,
                size: rest,
                free: true,
                starts_region: false,
            };
            self.chunks[best].size = size;
            self.chunks.insert(best + 1, rest);
        }
        self.chunks[best].free = false;
        self.chunks[best].address
    }

    fn extend(&mut self, size: u64) {
        let is_enough = self.next_region_size >= size;
        while self.next_region_size < size {
            self.next_region_size *= 2;
        }
        self.chunks.push(NaiveChunk {
            address: self.next_address,
            size: self.next_region_size,
            free: true,
            starts_region: true,
        });
        self.next_address += self.next_region_size;
        if is_enough {
            self.next_region_size *= 2;
        }
        self.merge();
    }

    fn free(&mut self, address: u64) {
        let freed = self
            .chunks
            .iter_mut()
            .find(|chunk| chunk.address == address);
        freed.unwrap().free = true;
        self.merge();
    }

    fn merge(&mut self) {
        let mut merged: Vec<NaiveChunk> = Vec::new();
        for &chunk in &self.chunks {
            match merged.last_mut() {
                Some(last) if last.free && chunk.free && !chunk.starts_region => {
                    last.size += chunk.size;
                }
                _ => merged.push(chunk),
            }
        }
        self.chunks = merged;
    }
}

fn sizes() -> impl Strategy<Value = u64> {
    prop_oneof![1..4096_u64, 1..MIB, 1..40 * MIB]
}

proptest! {
    #[test]
    fn promises_are_kept_whatever_fails(
        program in programs(sizes(), 150),
        growth in any::<bool>(),
        garbage_collection in any::<bool>(),
    ) {
        let config = Config::Bfc(BfcConfig {
            allow_growth: growth,
            garbage_collection,
            ..BfcConfig::default()
        });
        let capacity = Bytes::mib(200);
        let driver = TestDriver::new(capacity);
        run(&config, driver, &program);
    }

    #[test]
    fn addresses_are_those_of_a_plain_search(
        steps in prop::collection::vec((any::<bool>(), sizes(), any::<usize>()), 1..200),
    ) {
        let capacity = Bytes::gib(1 << 20);
        let driver = TestDriver::new(capacity);
        let mut allocator = allocator(driver, "");
        let mut naive = Naive {
            chunks: Vec::new(),
            next_region_size: 2 * MIB,
            next_address: 1 << 40,
        };
        let mut live = Vec::new();
        for (step, (frees, size, index)) in steps.into_iter().enumerate() {
            if frees && !live.is_empty() {
                let address: DeviceAddress = live.swap_remove(index % live.len());
                free(&mut allocator, address);
                naive.free(address.get());
            } else {
                let address = allocate(&mut allocator, size);
                prop_assert_eq!(address.get(), naive.allocate(size), "step {}", step);
                live.push(address);
            }
        }
    }

    /// The invariants hold with any lag, and no memory is lost.
    #[test]
    fn the_frontier_keeps_its_promises(
        program in programs(sizes(), 150),
        lag in 0..20_u64,
        capacity in 16..200_u64,
    ) {
        let config = Config::Bfc(BfcConfig {
            safe_frontier_lag: Some(lag),
            ..BfcConfig::default()
        });
        run(&config, TestDriver::new(Bytes::mib(capacity)), &program);
    }
}
