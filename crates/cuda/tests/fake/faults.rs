//! Fails every driver call once.

use lowtide_core::{Bytes, Config, DeviceAllocator, Driver, DriverError};
use lowtide_cuda::{CudaDriver, LoadError};

use super::common::load::Load;
use super::control::{Fake, Live};

const OUT_OF_MEMORY: i32 = 2;
const NO_DEVICE: i32 = 100;
const UNKNOWN: i32 = 999;

/// The functions that an allocator's calls lead to, and those that the test itself calls.
const CALLS: [&str; 20] = [
    "cuCtxGetCurrent",
    "cuEventCreate",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAlloc_v2",
    "cuMemCreate",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyDtoH_v2",
    "cuMemsetD8Async",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
];

const CONFIGS: [&str; 8] = [
    "direct",
    "pool:slab_size_mb:32",
    "buddy:arena_size_mb:8",
    "slab:arena_size_mb:8",
    "bfc",
    "caching",
    "caching:expandable_segments:True",
    "tide",
];

#[test]
fn an_allocator_survives_every_failure() {
    let mut struck = Vec::new();
    for text in CONFIGS {
        let config = text.parse().unwrap();
        let counts = run_with_failure(&config, None);
        for (call, count) in CALLS.into_iter().zip(counts) {
            // The first call, when nothing exists yet, one in the middle, and the last.
            let mut places = vec![1, count / 2, count];
            places.retain(|place| (1..=count).contains(place));
            places.sort_unstable();
            places.dedup();
            for nth in places {
                for code in [OUT_OF_MEMORY, UNKNOWN] {
                    run_with_failure(&config, Some((call, nth, code)));
                }
                struck.push(call);
            }
        }
    }
    for call in CALLS {
        assert!(struck.contains(&call), "{call} was never made");
    }
}

/// Runs a load on an allocator while one call fails. At the end, the allocator must account for every byte that it
/// has not released. Returns how often each of [`CALLS`] was made.
fn run_with_failure(config: &Config, failure: Option<(&str, u64, i32)>) -> [u64; CALLS.len()] {
    let fake = Fake::start();
    let driver = fake.driver();
    let (_, streams) = fake.program();
    let mut allocator = DeviceAllocator::new(driver, 0, config);
    let before = CALLS.map(|call| fake.calls(call));
    if let Some((call, nth, code)) = failure {
        fake.fail(call, nth, code);
    }
    let mut load = Load {
        allocator: &mut allocator,
        streams,
        steps: 80,
        size_max: Bytes::mib(1),
        failures_allowed: 1,
    };
    let result = load.run();
    fake.fail_none();
    result.unwrap_or_else(|error| panic!("{config} {failure:?}: {error}"));
    let reserved = allocator.stats().reserved_bytes.all.current;
    let reserved = u64::try_from(reserved).unwrap();
    assert_eq!(fake.used_bytes(), reserved, "{config} {failure:?}");
    // A page that the device refused to release is kept for reuse.
    let text = config.to_string();
    let has_pages = text.contains("expandable") || text == "tide";
    let is_kept = has_pages && reserved == Bytes::mib(2).get();
    assert!(
        reserved == 0 || is_kept,
        "{config} {failure:?}: {reserved} bytes"
    );
    std::array::from_fn(|index| fake.calls(CALLS[index]) - before[index])
}

#[test]
fn a_driver_that_cannot_be_made_leaves_nothing() {
    let made = [
        "cuDevicePrimaryCtxRetain",
        "cuDeviceGetAttribute",
        "cuMemGetAllocationGranularity",
        "cuThreadExchangeStreamCaptureMode",
        "cuCtxGetCurrent",
        "cuCtxPushCurrent_v2",
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemRelease",
        "cuMemAddressFree",
    ];
    for call in made {
        for nth in 1..=3 {
            let fake = Fake::start();
            let device = fake.device();
            fake.fail(call, nth, UNKNOWN);
            // SAFETY: it is given nothing.
            drop(unsafe { CudaDriver::new(device) });
            assert_eq!(fake.live(), Live::default(), "{call} {nth}");
        }
    }
}

/// The page that tests what the device supports.
#[test]
fn a_page_that_the_device_did_not_take_back_goes_back_later() {
    for call in ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"] {
        let fake = Fake::start();
        let device = fake.device();
        fake.fail(call, 1, UNKNOWN);
        let mut driver = fake.driver_of(device);
        assert!(driver.supports_export());
        assert_eq!(
            fake.calls("cuMemCreate"),
            1,
            "{call} says nothing of the page"
        );
        let address = driver.allocate(Bytes(512)).unwrap();
        driver.free(address, Bytes(512)).unwrap();
        assert_eq!(fake.used_bytes(), 0, "{call}");
        assert_eq!(fake.live().reservations, 0, "{call}");
    }
}

/// Another process's memory, which is released completely if a part of it cannot be imported.
#[test]
fn an_import_survives_every_failure() {
    for call in [
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemRelease",
        "cuMemUnmap",
        "cuMemAddressFree",
    ] {
        for nth in 1..=2 {
            import_with_failure(call, nth);
        }
    }
}

fn import_with_failure(call: &str, nth: u64) {
    let fake = Fake::start();
    let mut driver = fake.driver();
    let size = driver.granularity();
    let handles = [(); 2].map(|()| driver.create(size).unwrap());
    let before = fake.live();
    fake.fail(call, nth, UNKNOWN);
    let mut import = || {
        let parts = [driver.export(handles[0])?, driver.export(handles[1])?];
        let mut held = driver.begin_import(size + size)?;
        let mapped = parts
            .iter()
            .try_for_each(|part| driver.import_part(&mut held, part, size))
            .and_then(|()| driver.finish_import(&held));
        if let Err(error) = mapped {
            driver.abandon(held);
            return Err(error);
        }
        assert!(held.is_mapped());
        if driver.end_import(&mut held).is_err() {
            driver.end_import(&mut held)?;
        }
        Ok(())
    };
    let outcome: Result<(), DriverError> = import();
    assert_eq!(fake.live(), before, "{call} {nth}: {outcome:?}");
    fake.fail_none();
    import().unwrap();
    assert_eq!(fake.live(), before, "{call} {nth}");
}

#[test]
fn a_driver_that_does_not_start_says_why() {
    let fake = Fake::start();
    fake.fail("cuInit", 1, NO_DEVICE);
    assert_eq!(fake.open().unwrap_err(), LoadError::NoDevice);
    fake.fail("cuInit", 1, UNKNOWN);
    assert_eq!(
        fake.open().unwrap_err().to_string(),
        "NVIDIA's driver does not start: cuInit failed with error 999: unknown error \
         (CUDA_ERROR_UNKNOWN)"
    );
    fake.fail("cuDriverGetVersion", 1, UNKNOWN);
    let error = fake.open().unwrap_err();
    assert!(
        matches!(error, LoadError::Start(DriverError::Failed { .. })),
        "{error:?}"
    );
    assert!(fake.open().is_ok(), "and then it does");
}

#[test]
fn a_device_that_does_not_answer_is_an_error() {
    let fake = Fake::start();
    let library = fake.open().unwrap();
    let device = library.device(0).unwrap();
    for (call, ask) in [
        (
            "cuDeviceGetName",
            &(|| device.name().err()) as &dyn Fn() -> _,
        ),
        ("cuDeviceTotalMem_v2", &|| device.total_memory().err()),
        ("cuDeviceGetUuid_v2", &|| device.uuid().err()),
        ("cuDeviceCanAccessPeer", &|| {
            device.can_access(&device).err()
        }),
        ("cuDeviceGetCount", &|| library.device_count().err()),
        ("cuDeviceGet", &|| library.device(0).err()),
    ] {
        fake.fail(call, 1, UNKNOWN);
        let error: DriverError = ask().unwrap();
        let text = error.to_string();
        assert!(
            text.starts_with(&format!("{call} failed with error 999: ")),
            "{text}"
        );
    }
}
