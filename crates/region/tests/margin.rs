//! What a region leaves of the device to others when it grows.

mod common;

use std::sync::Arc;

use common::{TestBackups, TestDevice, TestDriver, allocator};
use lowtide_core::{Bytes, Config, MempoolId, SegmentSource, Stream};
use lowtide_region::{RegionMemory, RegionSource};
use lowtide_sim::Call;

/// Returns a region's segments on a device of so much memory.
fn source(driver: &TestDriver, margin: Bytes) -> RegionSource<TestDevice, TestBackups> {
    let allocator = allocator(driver, &Config::default());
    let mut device = TestDevice::new(driver, &allocator);
    device.margin = margin;
    let pool = MempoolId(1, 1);
    let memory = RegionMemory::new(device, "kv".into(), None, pool);
    RegionSource::new(Arc::new(memory), pool)
}

#[test]
fn a_region_grows_up_to_the_margin() {
    let above = Bytes::mib(768);
    let driver = TestDriver::new(Bytes::gib(1));
    let mut limited = source(&driver, Bytes::mib(256));
    for _ in 0..24 {
        let taken = limited.allocate(Bytes::mib(32), Stream::DEFAULT, true);
        assert!(taken.is_some());
    }
    assert_eq!(driver.physical_bytes(), above);
    let refused = limited.allocate(Bytes::mib(2), Stream::DEFAULT, true);
    assert_eq!((refused, driver.physical_bytes()), (None, above));
    // Nor is more than that taken ahead.
    let driver = TestDriver::new(Bytes::gib(1));
    let mut source = source(&driver, Bytes::mib(256));
    while let Some(_taken) = source.allocate(Bytes::mib(32), Stream::DEFAULT, false) {
        assert!(driver.physical_bytes() <= above);
    }
    assert!(driver.physical_bytes() > above - Bytes::mib(32));
}

/// An eighth of what the margin leaves besides the segment.
#[test]
fn the_margin_is_no_memory_to_take_ahead() {
    let driver = TestDriver::new(Bytes::gib(5));
    let mut source = source(&driver, Bytes::gib(1));
    let first = source.allocate(Bytes::gib(3), Stream::DEFAULT, false);
    let second = source.allocate(Bytes::mib(32), Stream::DEFAULT, false);
    assert!(first.is_some() && second.is_some());
    let ahead = driver.physical_bytes() - Bytes::gib(3) - Bytes::mib(32);
    assert_eq!(ahead, Bytes::mib((1024 - 32) / 8));
}

#[test]
fn the_driver_is_asked_for_what_is_free_only_where_that_matters() {
    let asked = |margin, is_limited| {
        let driver = TestDriver::new(Bytes::gib(1));
        let mut source = source(&driver, margin);
        let mut take = |mib| source.allocate(Bytes::mib(mib), Stream::DEFAULT, is_limited);
        assert!(take(64).is_some());
        let before = driver.calls(Call::MemoryInfo);
        assert!(take(2).is_some());
        driver.calls(Call::MemoryInfo) - before
    };
    assert_eq!(asked(Bytes::ZERO, true), 0);
    assert_eq!(asked(Bytes::ZERO, false), 1);
    assert_eq!(asked(Bytes::mib(2), true), 1);
}
