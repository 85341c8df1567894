//! Physical memory: what the device reports, and what it then refuses.

use lowtide_core::{Bytes, DeviceAllocator, Driver, DriverError, Stream};
use lowtide_cuda::CudaDriver;

use super::common::steps;
use super::control::{Fake, Live};

const VIRTUAL_MEMORY: u32 = 102;
const FILE_DESCRIPTORS: u32 = 103;
const RDMA: u32 = 110;

const NOT_PERMITTED: i32 = 800;
const NOT_SUPPORTED: i32 = 801;
const UNKNOWN: i32 = 999;

/// Network cards reach the memory of a frame if the device lets them.
#[test]
fn frames_are_made_for_rdma_where_the_device_has_it() {
    for has_rdma in [true, false] {
        let fake = Fake::start();
        let device = fake.device();
        fake.set_attribute(RDMA, has_rdma.into());
        let driver = fake.driver_of(device);
        let mut allocator = DeviceAllocator::new(driver, 0, &"tide".parse().unwrap());
        let address = allocator.allocate(Bytes::mib(3), Stream::DEFAULT).unwrap();
        for offset in [Bytes::ZERO, Bytes::mib(2)] {
            let flags = fake.properties_at(address + offset).allocFlags;
            assert_eq!(flags.gpuDirectRDMACapable, u8::from(has_rdma), "{offset}");
        }
    }
}

#[test]
fn what_is_not_offered_is_not_tried() {
    for (attribute, exportable) in [(RDMA, true), (FILE_DESCRIPTORS, false)] {
        let fake = Fake::start();
        let device = fake.device();
        fake.set_attribute(attribute, 0);
        let driver = fake.driver_of(device);
        assert_eq!(fake.calls("cuMemCreate"), 1, "{attribute}");
        assert_eq!(driver.supports_export(), exportable);
        assert!(driver.supports_virtual_memory());
    }
}

#[test]
fn a_device_without_virtual_memory_has_the_rest() {
    let fake = Fake::start();
    let device = fake.device();
    fake.set_attribute(VIRTUAL_MEMORY, 0);
    let mut driver = fake.driver_of(device);
    assert!(!driver.supports_virtual_memory());
    assert!(!driver.supports_export());
    assert_eq!(driver.granularity(), Bytes::mib(2));
    let call = "cuMemCreate";
    assert_eq!(
        driver.create(Bytes::mib(2)),
        Err(DriverError::Unsupported { call })
    );
    assert_eq!(fake.calls("cuMemCreate"), 0);
    steps::plain_memory(&mut driver).unwrap();
}

/// A full device refuses pages, which says nothing about their kind. A failure to query the device is an error.
#[test]
fn a_device_that_does_not_answer_is_asked_again() {
    const OUT_OF_MEMORY: i32 = 2;
    let fake = Fake::start();
    let device = fake.device();
    for nth in 1..=3 {
        fake.fail("cuMemGetAllocationGranularity", nth, OUT_OF_MEMORY);
    }
    // SAFETY: it is given nothing.
    let refused = unsafe { CudaDriver::new(device.clone()) };
    assert_eq!(refused.err(), Some(DriverError::OutOfMemory));
    fake.fail("cuMemGetAllocationGranularity", 1, OUT_OF_MEMORY);
    fake.fail("cuMemCreate", 1, OUT_OF_MEMORY);
    let mut driver = fake.driver_of(device);
    assert!(driver.supports_virtual_memory());
    steps::virtual_memory(&mut driver).unwrap();
}

/// A container may forbid exportable handles: creation fails, with RDMA and without.
#[test]
fn plain_handles_where_exportable_ones_are_refused() {
    let fake = Fake::start();
    let device = fake.device();
    fake.fail("cuMemCreate", 1, NOT_PERMITTED);
    fake.fail("cuMemCreate", 2, NOT_PERMITTED);
    let mut driver = fake.driver_of(device);
    assert!(driver.supports_virtual_memory());
    assert!(!driver.supports_export());

    // The choice is remembered: from here on, one call creates one handle.
    assert_eq!(fake.calls("cuMemCreate"), 3);
    steps::virtual_memory(&mut driver).unwrap();
    assert_eq!(fake.calls("cuMemCreate"), 4);
    let handle = driver.create(Bytes::mib(2)).unwrap();
    let call = "cuMemExportToShareableHandle";
    assert_eq!(
        driver.export(handle).unwrap_err(),
        DriverError::Unsupported { call }
    );
    driver.release(handle).unwrap();
}

/// WSL2 reports RDMA, creates and maps such handles, and fails when access is set.
#[test]
fn handles_without_rdma_where_access_to_them_is_refused() {
    let fake = Fake::start();
    let device = fake.device();
    fake.fail("cuMemSetAccess", 1, UNKNOWN);
    let mut driver = fake.driver_of(device);
    assert!(driver.supports_export());
    assert_eq!(fake.calls("cuMemCreate"), 2);
    steps::virtual_memory(&mut driver).unwrap();
    drop(driver);
    assert_eq!(fake.live(), Live::default());
}

#[test]
fn plain_handles_where_access_to_all_others_is_refused() {
    let fake = Fake::start();
    let device = fake.device();
    fake.fail("cuMemSetAccess", 1, UNKNOWN);
    fake.fail("cuMemSetAccess", 2, UNKNOWN);
    let mut driver = fake.driver_of(device);
    assert!(driver.supports_virtual_memory());
    assert!(!driver.supports_export());
    steps::virtual_memory(&mut driver).unwrap();
}

#[test]
fn no_virtual_memory_where_every_handle_is_refused() {
    let fake = Fake::start();
    let device = fake.device();
    for nth in 1..=3 {
        fake.fail("cuMemCreate", nth, NOT_SUPPORTED);
    }
    let mut driver = fake.driver_of(device);
    assert!(!driver.supports_virtual_memory());
    steps::plain_memory(&mut driver).unwrap();
    drop(driver);
    assert_eq!(fake.live(), Live::default());
}

#[test]
fn a_full_device_is_not_taken_for_a_refusal() {
    let fake = Fake::start();
    let device = fake.device();
    fake.set_capacity(Bytes::mib(1).get());
    let mut driver = fake.driver_of(device);
    assert!(driver.supports_export());
    assert_eq!(driver.create(Bytes::mib(2)), Err(DriverError::OutOfMemory));
    fake.set_capacity(Bytes::mib(64).get());
    steps::export_and_import(&mut driver).unwrap();
}
