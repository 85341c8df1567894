//! Breaks every rule of the device once, and checks the statistics.

use lowtide_core::{Bytes, DeviceAddress, Driver, DriverError, EventHandle, Handle, Stream};
use lowtide_sim::{AddressSource, Call, FaultPlan, SimConfig, SimDriver};

const PAGE: Bytes = Bytes::mib(2);

fn device_of(capacity: Bytes) -> SimDriver {
    SimDriver::new(SimConfig {
        capacity: Some(capacity),
        ..SimConfig::default()
    })
}

/// A driver with 16 MiB reserved, 4 MiB mapped at their start, and 20 MiB allocated.
struct Scene {
    driver: SimDriver,
    range: DeviceAddress,
    handle: Handle,
    memory: DeviceAddress,
}

fn scene() -> Scene {
    let mut driver = SimDriver::default();
    let range = driver.reserve(Bytes::mib(16)).expect("the device is empty");
    let handle = driver.create(Bytes::mib(4)).expect("the device is empty");
    driver
        .map(range, Bytes::mib(4), handle)
        .expect("the device is empty");
    let memory = driver
        .allocate(Bytes::mib(20))
        .expect("the device is empty");
    Scene {
        driver,
        range,
        handle,
        memory,
    }
}

type Break = fn(&mut Scene) -> Result<(), DriverError>;

/// Breaks one rule in a new scene for each case. The violation must begin with the text beside it.
fn check(cases: &[(&str, Break)]) {
    for (message, broken) in cases {
        let mut scene = scene();
        let error = broken(&mut scene).expect_err(message);
        assert!(matches!(error, DriverError::Failed { .. }), "{error:?}");
        let violations = scene.driver.violations();
        assert_eq!(violations.len(), 1, "{message}");
        assert!(
            violations[0].starts_with(message),
            "{violations:?}, expected {message}"
        );
    }
}

#[test]
fn rules_of_allocating() {
    check(&[
        ("cudaMalloc: the size is zero", |s| {
            s.driver.allocate(Bytes::ZERO).map(drop)
        }),
        ("cudaFree: nothing is allocated", |s| {
            s.driver.free(s.memory + PAGE, Bytes::mib(20))
        }),
        ("cudaFree: nothing is allocated", |s| {
            s.driver.free(s.memory, Bytes::mib(20))?;
            s.driver.free(s.memory, Bytes::mib(20))
        }),
        (
            "cudaFree: 0x100000000000 holds 20971520B, not 4194304B",
            |s| s.driver.free(s.memory, Bytes::mib(4)),
        ),
    ]);
}

#[test]
fn rules_of_reserving() {
    check(&[
        ("cuMemAddressReserve: 3B are not a multiple", |s| {
            s.driver.reserve(Bytes(3)).map(drop)
        }),
        ("cuMemAddressReserve: 0B are not a multiple", |s| {
            s.driver.reserve(Bytes::ZERO).map(drop)
        }),
        ("cuMemAddressFree: memory is still mapped", |s| {
            s.driver.unreserve(s.range, Bytes::mib(16))
        }),
        ("cuMemAddressFree: 4194304B at", |s| {
            s.driver.unreserve(s.range, Bytes::mib(4))
        }),
        ("cuMemAddressFree: 4194304B at", |s| {
            s.driver.unreserve(s.range + Bytes::mib(12), Bytes::mib(4))
        }),
    ]);
}

#[test]
fn rules_of_creating() {
    check(&[
        ("cuMemCreate: 1048576B are not a multiple", |s| {
            s.driver.create(Bytes::mib(1)).map(drop)
        }),
        ("cuMemRelease: Handle(9) does not exist", |s| {
            s.driver.release(Handle(9))
        }),
        (
            "cuMemRelease: Handle(0) does not exist or was released",
            |s| {
                s.driver.release(s.handle)?;
                s.driver.release(s.handle)
            },
        ),
    ]);
}

#[test]
fn rules_of_mapping() {
    check(&[
        ("cuMemMap: Handle(9) does not exist", |s| {
            s.driver.map(s.range + Bytes::mib(4), PAGE, Handle(9))
        }),
        ("cuMemMap: Handle(0) does not exist or was released", |s| {
            s.driver.release(s.handle)?;
            s.driver
                .map(s.range + Bytes::mib(4), Bytes::mib(4), s.handle)
        }),
        ("cuMemMap: Handle(0) is 4194304B and maps whole", |s| {
            s.driver.map(s.range + Bytes::mib(4), PAGE, s.handle)
        }),
        (
            "cuMemMap: 4194304B at 0x1000000e00000 are not within a reserved range",
            |s| {
                s.driver
                    .map(s.range + Bytes::mib(14), Bytes::mib(4), s.handle)
            },
        ),
        (
            "cuMemMap: 0x1000000200000 to 0x1000000600000 overlap 4194304B",
            |s| s.driver.map(s.range + PAGE, Bytes::mib(4), s.handle),
        ),
        ("cuMemMap: 0x1000000500000 is not a multiple", |s| {
            s.driver
                .map(s.range + Bytes::mib(5), Bytes::mib(4), s.handle)
        }),
        (
            "cuMemMap: 4194304B at 0xffffffffffe00000 pass the end",
            |s| {
                s.driver.map(
                    DeviceAddress(u64::MAX - PAGE.get() + 1),
                    Bytes::mib(4),
                    s.handle,
                )
            },
        ),
    ]);
}

#[test]
fn rules_of_access_and_unmapping() {
    check(&[
        (
            "cuMemSetAccess: no mapping starts at 0x1000000400000",
            |s| s.driver.set_access(s.range, Bytes::mib(6)),
        ),
        ("cuMemSetAccess: 0x1000000200000 is inside a mapping", |s| {
            s.driver.set_access(s.range, PAGE)
        }),
        ("cuMemUnmap: 0x1000000200000 is inside a mapping", |s| {
            s.driver.unmap(s.range, PAGE)
        }),
        ("cuMemUnmap: no mapping starts at 0x1000000000000", |s| {
            s.driver.unmap(s.range, Bytes::mib(4))?;
            s.driver.unmap(s.range, Bytes::mib(4))
        }),
        ("kernel: 1B at 0x1000000000000: no access was set", |s| {
            s.driver.access(s.range, Bytes(1))
        }),
        (
            "kernel: 8388608B at 0x1000000000000: there is no memory at 0x1000000400000",
            |s| {
                s.driver.set_access(s.range, Bytes::mib(4))?;
                s.driver.access(s.range, Bytes::mib(8))
            },
        ),
    ]);
}

#[test]
fn rules_of_events() {
    check(&[
        ("cudaEventQuery: EventHandle(7) does not exist", |s| {
            s.driver.query_event(EventHandle(7)).map(drop)
        }),
        ("cudaEventSynchronize: EventHandle(0) does not exist", |s| {
            let event = s.driver.record_event(Stream(1))?;
            s.driver.release_event(event);
            s.driver.synchronize_event(event)
        }),
    ]);
}

#[test]
fn a_lost_event_is_a_violation_though_its_release_cannot_fail() {
    let mut driver = SimDriver::default();
    driver.release_event(EventHandle(0));
    assert_eq!(
        driver.violations(),
        ["cudaEventDestroy: EventHandle(0) does not exist"]
    );
}

#[test]
fn what_is_given_back_in_order_leaves_nothing() {
    let Scene {
        mut driver,
        range,
        handle,
        memory,
    } = scene();
    let event = driver.record_event(Stream(1)).unwrap();
    assert_eq!(
        driver.leaks(),
        [
            "20971520B are allocated at 0x100000000000",
            "Handle(0) is mapped at 0x1000000000000",
            "Handle(0) of 4194304B is not released",
            "16777216B are reserved at 0x1000000000000",
            "EventHandle(0) in Stream(1) is not released",
        ]
    );
    driver.set_access(range, Bytes::mib(4)).unwrap();
    driver.access(range, Bytes::mib(4)).unwrap();
    driver.unmap(range, Bytes::mib(4)).unwrap();
    driver.release(handle).unwrap();
    driver.unreserve(range, Bytes::mib(16)).unwrap();
    driver.access(memory, Bytes::mib(20)).unwrap();
    driver.free(memory, Bytes::mib(20)).unwrap();
    driver.release_event(event);
    assert!(driver.leaks().is_empty());
    assert!(driver.violations().is_empty());
    assert_eq!(driver.physical_bytes(), Bytes::ZERO);
    assert_eq!(driver.physical_bytes_max(), Bytes::mib(24));
}

#[test]
fn a_released_handle_leaves_the_device_with_its_last_mapping() {
    let Scene {
        mut driver,
        range,
        handle,
        ..
    } = scene();
    // The same memory at two addresses, as when pages move to another range while a kernel runs.
    driver
        .map(range + Bytes::mib(8), Bytes::mib(4), handle)
        .unwrap();
    assert_eq!(driver.created_bytes(), Bytes::mib(4));
    driver.release(handle).unwrap();
    driver.unmap(range, Bytes::mib(4)).unwrap();
    assert_eq!(driver.created_bytes(), Bytes::mib(4));
    driver.unmap(range + Bytes::mib(8), Bytes::mib(4)).unwrap();
    assert_eq!(driver.created_bytes(), Bytes::ZERO);
    assert!(driver.violations().is_empty());
}

#[test]
fn several_handles_are_opened_and_unmapped_in_one_call() {
    let mut driver = SimDriver::default();
    let range = driver.reserve(Bytes::mib(8)).unwrap();
    for offset in [0, 2, 4, 6] {
        let handle = driver.create(PAGE).unwrap();
        driver
            .map(range + Bytes::mib(offset), PAGE, handle)
            .unwrap();
        driver.release(handle).unwrap();
    }
    driver.set_access(range + PAGE, Bytes::mib(4)).unwrap();
    driver.access(range + PAGE, Bytes::mib(4)).unwrap();
    assert!(driver.access(range, PAGE).is_err());
    driver.unmap(range, Bytes::mib(8)).unwrap();
    driver.unreserve(range, Bytes::mib(8)).unwrap();
    assert!(driver.leaks().is_empty());
}

#[test]
fn addresses_are_used_again() {
    let mut driver = SimDriver::default();
    let range = driver.reserve(PAGE).unwrap();
    driver.unreserve(range, PAGE).unwrap();
    assert_eq!(driver.reserve(Bytes::mib(4)), Ok(range));
    let memory = driver.allocate(PAGE).unwrap();
    driver.free(memory, PAGE).unwrap();
    assert_eq!(driver.allocate(Bytes::mib(4)), Ok(memory));
}

#[test]
fn the_device_is_as_large_as_it_was_said_to_be() {
    let mut driver = device_of(Bytes::mib(10));
    let a = driver.allocate(Bytes::mib(4)).unwrap();
    driver.create(Bytes::mib(4)).unwrap();
    let info = driver.memory_info().unwrap();
    assert_eq!((info.free, info.total), (Bytes::mib(2), Bytes::mib(10)));
    assert_eq!(
        driver.allocate(Bytes::mib(3)),
        Err(DriverError::OutOfMemory)
    );
    assert_eq!(driver.create(Bytes::mib(4)), Err(DriverError::OutOfMemory));
    assert_eq!(
        driver.allocate(Bytes(u64::MAX)),
        Err(DriverError::OutOfMemory)
    );
    driver.free(a, Bytes::mib(4)).unwrap();
    driver.create(Bytes::mib(6)).unwrap();
    assert_eq!(driver.allocate(Bytes(1)), Err(DriverError::OutOfMemory));
    assert_eq!(driver.stats(Call::Allocate).failures, 3);
    assert!(driver.violations().is_empty());
}

#[test]
fn small_allocations_share_pages() {
    let mut driver = device_of(Bytes::mib(4));
    let addresses: Vec<_> = (0..4096)
        .map(|_| driver.allocate(Bytes(300)).unwrap())
        .collect();
    assert_eq!(driver.allocated_bytes(), Bytes::mib(2));
    let next = driver.allocate(Bytes::mib(1)).unwrap();
    assert_eq!(driver.allocated_bytes(), Bytes::mib(4));
    for address in addresses {
        driver.free(address, Bytes(300)).unwrap();
    }
    assert_eq!(driver.allocated_bytes(), Bytes::mib(2));
    driver.free(next, Bytes::mib(1)).unwrap();
    assert_eq!(driver.allocated_bytes(), Bytes::ZERO);
    assert!(driver.violations().is_empty());
}

#[test]
fn a_planned_fault_changes_nothing() {
    let lost = DriverError::Failed {
        call: "cuMemMap",
        code: 999,
        message: "unknown error".into(),
    };
    let mut driver = SimDriver::default();
    driver.set_faults(FaultPlan::nth(Call::Map, 2, lost.clone()));
    let range = driver.reserve(Bytes::mib(4)).unwrap();
    let handle = driver.create(PAGE).unwrap();
    driver.map(range, PAGE, handle).unwrap();
    let second = range + PAGE;
    assert_eq!(driver.map(second, PAGE, handle), Err(lost));
    assert!(
        driver.unmap(second, PAGE).is_err(),
        "the failed call mapped"
    );
    driver.map(second, PAGE, handle).unwrap();
    assert_eq!(driver.violations().len(), 1);
    let stats = driver.stats(Call::Map);
    assert_eq!(
        (stats.count, stats.failures, stats.bytes),
        (3, 1, Bytes::mib(4))
    );
}

#[test]
fn an_old_device_has_no_virtual_memory() {
    let mut driver = SimDriver::new(SimConfig {
        virtual_memory: false,
        ..SimConfig::default()
    });
    assert!(!driver.supports_virtual_memory());
    let call = "cuMemAddressReserve";
    assert_eq!(driver.reserve(PAGE), Err(DriverError::Unsupported { call }));
    assert!(driver.violations().is_empty());
}

/// Gives every allocation the same address. Reserved ranges get the first page or, later, the second.
#[derive(Default)]
struct Recorded {
    reserved: u64,
    given_back: u32,
}

const RECORDED: DeviceAddress = DeviceAddress(0x7f00_0000_0000);

impl AddressSource for Recorded {
    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        if size > Bytes::gib(1) {
            return Err(DriverError::OutOfMemory);
        }
        Ok(RECORDED)
    }

    fn freed(&mut self, _address: DeviceAddress, _size: Bytes) {
        self.given_back += 1;
    }

    fn reserve(&mut self, _size: Bytes) -> Result<DeviceAddress, DriverError> {
        self.reserved = (self.reserved + 1).min(2);
        Ok(DeviceAddress(self.reserved * PAGE.get()))
    }

    fn unreserved(&mut self, _address: DeviceAddress, _size: Bytes) {}
}

#[test]
fn a_source_of_addresses_is_checked() {
    let mut driver = SimDriver::with_addresses(SimConfig::default(), Recorded::default());
    assert_eq!(driver.allocate(PAGE), Ok(RECORDED));
    assert_eq!(
        driver.allocate(Bytes::gib(2)),
        Err(DriverError::OutOfMemory)
    );
    assert!(driver.violations().is_empty());
    assert!(driver.allocate(PAGE).is_err());
    assert_eq!(driver.violations().len(), 1);
    assert_eq!(driver.addresses_mut().given_back, 1);
}

#[test]
fn reserved_ranges_of_a_recording_may_overlap() {
    let mut driver = SimDriver::with_addresses(SimConfig::default(), Recorded::default());
    let first = driver.reserve(Bytes::mib(8)).unwrap();
    let second = driver.reserve(Bytes::mib(8)).unwrap();
    assert_eq!(second, first + PAGE);
    assert_eq!(driver.reserve(Bytes::mib(8)), Ok(second));
    let handle = driver.create(PAGE).unwrap();
    driver.map(second, PAGE, handle).unwrap();
    // The first range still contains the mapping. The last range around it must not be removed.
    driver.unreserve(second, Bytes::mib(8)).unwrap();
    driver.unreserve(second, Bytes::mib(8)).unwrap();
    assert!(driver.unreserve(first, Bytes::mib(8)).is_err());
    driver.unmap(second, PAGE).unwrap();
    driver.unreserve(first, Bytes::mib(8)).unwrap();
    assert_eq!(driver.violations().len(), 1);
}
