//! A region makes few driver calls, each for much memory.

mod common;

use common::{TestDriver, TestRegion, allocator};
use lowtide_core::{Bytes, Config, Stream};
use lowtide_sim::Call;

const COUNTED: [Call; 5] = [
    Call::Create,
    Call::Map,
    Call::SetAccess,
    Call::Unmap,
    Call::Release,
];

fn calls(driver: &TestDriver) -> [u64; 5] {
    COUNTED.map(|call| driver.calls(call))
}

fn since(driver: &TestDriver, before: [u64; 5]) -> [u64; 5] {
    let mut counts = calls(driver);
    counts
        .iter_mut()
        .zip(before)
        .for_each(|(count, before)| *count -= before);
    counts
}

#[test]
fn a_thousand_segments_are_few_pieces() {
    let driver = TestDriver::new(Bytes::gib(64));
    let allocator = allocator(&driver, &Config::default());
    let region = TestRegion::new(1, None, &driver, &allocator);
    let before = calls(&driver);
    for _ in 0..1024 {
        region
            .allocate(Bytes::mib(32), Stream(0))
            .expect("there is room");
    }
    let [creates, maps, accesses, ..] = since(&driver, before);
    assert!(creates <= 64, "{creates} pieces");
    assert_eq!((maps, accesses), (creates, creates));
    let mapped = region.memory.figures().expect("no call panics").mapped;
    assert!(mapped <= Bytes::gib(33), "{mapped}");

    let before = calls(&driver);
    region.pause().expect("nothing fails");
    assert_eq!(since(&driver, before), [0, 0, 0, 1, creates]);
    let before = calls(&driver);
    region.resume().expect("nothing fails");
    assert_eq!(since(&driver, before), [32, 32, 1, 0, 0]);
    let before = calls(&driver);
    region.pause().expect("nothing fails");
    assert_eq!(since(&driver, before), [0, 0, 0, 1, 32]);
    region.resume().expect("nothing fails");
    assert_eq!(
        region.memory.figures().expect("no call panics").mapped,
        Bytes::gib(32)
    );
}

/// A segment larger than a shared piece has one piece, from the first call on, which its neighbours do not share.
#[test]
fn a_large_segment_is_one_piece() {
    let driver = TestDriver::new(Bytes::gib(64));
    let allocator = allocator(&driver, &Config::default());
    let region = TestRegion::new(1, None, &driver, &allocator);
    for gib in [32, 3] {
        let before = calls(&driver);
        region
            .allocate(Bytes::gib(gib), Stream(0))
            .expect("there is room");
        assert_eq!(since(&driver, before), [1, 1, 1, 0, 0]);
    }
    region
        .allocate(Bytes::mib(32), Stream(0))
        .expect("there is room");
    region.pause().expect("nothing fails");
    let before = calls(&driver);
    region.resume().expect("nothing fails");
    assert_eq!(since(&driver, before), [3, 3, 1, 0, 0]);
}

/// If the device has too little for a larger piece, the segment gets what it needs.
#[test]
fn the_last_of_the_memory_is_used() {
    let driver = TestDriver::new(Bytes::gib(2));
    let allocator = allocator(&driver, &Config::default());
    let region = TestRegion::new(1, None, &driver, &allocator);
    for _ in 0..64 {
        region
            .allocate(Bytes::mib(32), Stream(0))
            .expect("there is room");
    }
    assert_eq!(driver.physical_bytes(), Bytes::gib(2));
    let refused = region.allocate(Bytes::mib(2), Stream(0));
    assert!(refused.is_err_and(|error| error.is_out_of_memory()));
    assert_eq!(driver.violations(), [""; 0]);
}

/// A limit counts segments, so nothing else is taken if there is one. Otherwise little of the free memory is taken.
#[test]
fn little_is_taken_ahead_where_little_is_left() {
    let segment = Bytes::mib(32);
    let driver = TestDriver::new(Bytes::gib(4));
    let allocator = allocator(&driver, &Config::default());
    let region = TestRegion::new(1, None, &driver, &allocator);
    for count in 1..=112 {
        region.allocate(segment, Stream(0)).expect("there is room");
        let ahead = driver.physical_bytes() - Bytes(count * segment.get());
        let left = Bytes::gib(4) - driver.physical_bytes();
        // The rest of the last piece and a new one.
        let ahead_max = segment + Bytes(left.get() / 7);
        assert!(ahead <= ahead_max, "{ahead} ahead, {left} left");
    }

    let driver = TestDriver::new(Bytes::gib(64));
    let allocator = common::allocator(&driver, &Config::default());
    let region = TestRegion::new(1, None, &driver, &allocator);
    let limit = Bytes::gib(2);
    let set = allocator.with_all(|device| device.set_limit(Some(limit)));
    set.expect("no call panics");
    for _ in 0..64 {
        region.allocate(segment, Stream(0)).expect("there is room");
        let stats = allocator.with_all(|device| device.stats());
        let reserved = stats.expect("no call panics").reserved();
        assert_eq!(driver.physical_bytes(), reserved);
    }
    assert_eq!(driver.physical_bytes(), limit);
}

/// The memory of a removed segment is used by the next: on another stream, once the first stream's work is done.
#[test]
fn memory_is_used_again_before_more_is_taken() {
    let driver = TestDriver::new(Bytes::gib(2));
    let config: Config = "direct".parse().expect("there is such a strategy");
    let allocator = allocator(&driver, &config);
    let region = TestRegion::new(1, None, &driver, &allocator);
    let blocks: Vec<_> = (0..3)
        .map(|_| {
            region
                .allocate(Bytes::kib(1), Stream(1))
                .expect("there is room")
        })
        .collect();
    for &block in &blocks[..2] {
        driver.launch(block, Stream(1));
        assert_eq!(region.allocator.free(block.address), Ok(()));
    }
    let before = (calls(&driver), driver.calls(Call::SynchronizeDevice));
    let own = region
        .allocate(Bytes::kib(1), Stream(1))
        .expect("there is room");
    assert_eq!(own, blocks[0]);
    assert_eq!(
        driver.calls(Call::SynchronizeDevice),
        before.1,
        "its order is the stream's"
    );
    let other = region
        .allocate(Bytes::kib(1), Stream(2))
        .expect("there is room");
    assert_eq!(other, blocks[1]);
    driver.give(other, Stream(2));
    assert_eq!(driver.calls(Call::SynchronizeDevice), before.1 + 1);
    assert_eq!(since(&driver, before.0), [0; 5]);
    for block in [own, other, blocks[2]] {
        assert_eq!(region.allocator.free(block.address), Ok(()));
    }
    assert_eq!(driver.violations(), [""; 0]);
    assert_eq!(
        driver.leaks(),
        [""; 0],
        "the last segment takes all with it"
    );
}
