//! The memory that a region leaves free on the device when it grows.

mod common;

use common::{TestDevice, TestDriver, TestRegion, allocator};
use lowtide_core::{Bytes, Config, Stream};
use lowtide_sim::Call;

/// Returns a region on a device with a margin. Each of its blocks is a segment.
fn region(driver: &TestDriver, margin: Bytes, is_limited: bool) -> TestRegion {
    let config: Config = "direct".parse().expect("there is such a strategy");
    let allocator = allocator(driver, &config);
    let limit = is_limited.then_some(Bytes::gib(64));
    let set = allocator.with_all(|device| device.set_limit(limit));
    set.expect("no call panics");
    let mut device = TestDevice::new(driver, &allocator);
    device.margin = margin;
    TestRegion::on(device, 1, None)
}

#[test]
fn a_region_grows_up_to_the_margin() {
    let above = Bytes::mib(768);
    let driver = TestDriver::new(Bytes::gib(1));
    let limited = region(&driver, Bytes::mib(256), true);
    for _ in 0..24 {
        let taken = limited.allocate(Bytes::mib(32), Stream::DEFAULT);
        taken.expect("there is room");
    }
    assert_eq!(driver.physical_bytes(), above);
    let refused = limited.allocate(Bytes::mib(2), Stream::DEFAULT);
    assert!(refused.is_err_and(|error| error.is_out_of_memory()));
    assert_eq!(driver.physical_bytes(), above);
    // Memory for later segments stays below the margin, too.
    let driver = TestDriver::new(Bytes::gib(1));
    let region = region(&driver, Bytes::mib(256), false);
    while region.allocate(Bytes::mib(32), Stream::DEFAULT).is_ok() {
        assert!(driver.physical_bytes() <= above);
    }
    assert!(driver.physical_bytes() > above - Bytes::mib(32));
}

/// An eighth of what is free besides the margin and the segment.
#[test]
fn the_margin_is_no_memory_to_take_ahead() {
    let driver = TestDriver::new(Bytes::gib(5));
    let region = region(&driver, Bytes::gib(1), false);
    let first = region.allocate(Bytes::gib(3), Stream::DEFAULT);
    let second = region.allocate(Bytes::mib(32), Stream::DEFAULT);
    assert!(first.is_ok() && second.is_ok());
    let ahead = driver.physical_bytes() - Bytes::gib(3) - Bytes::mib(32);
    assert_eq!(ahead, Bytes::mib((1024 - 32) / 8));
}

#[test]
fn the_driver_is_asked_for_what_is_free_only_where_that_matters() {
    let asked = |margin, is_limited| {
        let driver = TestDriver::new(Bytes::gib(1));
        let region = region(&driver, margin, is_limited);
        let take = |mib| region.allocate(Bytes::mib(mib), Stream::DEFAULT);
        assert!(take(64).is_ok());
        let before = driver.calls(Call::MemoryInfo);
        // The allocator asks, too, for any new memory.
        let outside = region.allocator.allocate(Bytes::mib(2), Stream::DEFAULT);
        assert!(outside.is_ok());
        let by_allocator = driver.calls(Call::MemoryInfo) - before;
        assert!(take(2).is_ok());
        driver.calls(Call::MemoryInfo) - before - 2 * by_allocator
    };
    assert_eq!(asked(Bytes::ZERO, true), 0);
    assert_eq!(asked(Bytes::ZERO, false), 1);
    assert_eq!(asked(Bytes::mib(2), true), 1);
}
