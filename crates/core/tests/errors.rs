//! The messages of failed requests: PyTorch's words, with correct numbers.

use std::error::Error;
use std::sync::{Arc, LazyLock};

use lowtide_core::{
    AllocError, Bytes, Config, DeviceAddress, DeviceAllocator, DriverError, MempoolId, OutOfMemory,
    PoolSetting, SegmentSource, Stream, TorchRelease,
};
use lowtide_sim::program::configs;
use lowtide_sim::{Call, FaultPlan, SimConfig, SimDriver};

fn allocator(config: &Config, capacity: Bytes) -> DeviceAllocator<SimDriver> {
    let capacity = Some(capacity);
    DeviceAllocator::new(
        SimDriver::new(SimConfig {
            capacity,
            ..SimConfig::default()
        }),
        3,
        config,
    )
}

fn out_of_memory(result: Result<DeviceAddress, AllocError>) -> OutOfMemory {
    match result {
        Err(AllocError::OutOfMemory(error)) => *error,
        other => panic!("expected too little memory, got {other:?}"),
    }
}

/// The end of PyTorch's message.
const ADVICE: &str = "If reserved but unallocated memory is large try setting \
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for \
    Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html\
    #optimizing-memory-usage-with-pytorch-cuda-alloc-conf)";

#[test]
fn running_out_reads_as_in_pytorch() -> Result<(), AllocError> {
    let mut allocator = allocator(&Config::default(), Bytes::mib(100));
    let block = allocator.allocate(Bytes::mib(30), Stream::DEFAULT)?;
    allocator.allocate(Bytes::mib(3), Stream::DEFAULT)?;
    let error = allocator
        .allocate(Bytes::mib(61), Stream::DEFAULT)
        .unwrap_err();
    assert!(error.is_out_of_memory());
    assert_eq!(
        error.to_string(),
        "CUDA out of memory. Tried to allocate 62.00 MiB. GPU 3 has a total capacity of 100.00 MiB \
         of which 50.00 MiB is free. Of the allocated memory 33.00 MiB is allocated by PyTorch, and \
         17.00 MiB is reserved by PyTorch but unallocated. "
            .to_owned()
            + ADVICE
            + " The largest free block has 17.00 MiB.\nBiggest holders: 1 x 30.00 MiB, 1 x 3.00 MiB."
    );

    allocator.set_limit(Some(Bytes::mib(80)));
    allocator.free(block)?;
    let error = allocator
        .allocate(Bytes::mib(61), Stream::DEFAULT)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "CUDA out of memory. Tried to allocate 62.00 MiB. GPU 3 has a total capacity of 100.00 MiB \
         of which 80.00 MiB is free. 80.00 MiB allowed; Of the allocated memory 3.00 MiB is \
         allocated by PyTorch, and 17.00 MiB is reserved by PyTorch but unallocated. "
            .to_owned()
            + ADVICE
            + " The largest free block has 17.00 MiB.\nBiggest holders: 1 x 3.00 MiB."
    );
    Ok(())
}

/// The texts are those of each release's wheels.
#[test]
fn the_advice_is_that_of_the_release() {
    let old = "pytorch.org/docs/stable/notes/cuda.html#environment-variables)";
    let new = "docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)";
    let to_enable = |variable: &str, document: &str| {
        format!(
            " If reserved but unallocated memory is large try setting {variable}=expandable_segments:True to avoid \
             fragmentation.  See documentation for Memory Management  (https://{document}"
        )
    };
    let addresses = " expandable_segments is enabled. If instead the process is running out of virtual address space \
                     (VSZ), expandable segments may be over-reserving VA (each segment reserves ~9/8 of device memory, \
                     times the number of streams); reduce it via PYTORCH_CUDA_ALLOC_CONF expandable_segments_reserve / \
                     expandable_segments_reserve_by_class.";
    let cuda = "PYTORCH_CUDA_ALLOC_CONF";
    let newer = to_enable(cuda, new);
    let said = [
        ((2, 8), to_enable(cuda, old), to_enable(cuda, old)),
        ((2, 9), to_enable(cuda, old), to_enable(cuda, old)),
        (
            (2, 10),
            to_enable("PYTORCH_ALLOC_CONF", old),
            to_enable("PYTORCH_ALLOC_CONF", old),
        ),
        ((2, 11), newer.clone(), newer.clone()),
        ((2, 13), newer.clone(), newer.clone()),
        ((2, 14), newer.clone(), String::new()),
        ((2, 15), newer.clone(), addresses.to_owned()),
        ((3, 0), newer, addresses.to_owned()),
    ];
    for ((major, minor), without, with) in said {
        for (config, expected) in [
            ("caching", without),
            ("caching:expandable_segments:True", with),
            ("tide", String::new()),
            ("pool", String::new()),
        ] {
            let mut allocator = allocator(&config.parse().unwrap(), Bytes::mib(100));
            let mut error = out_of_memory(allocator.allocate(Bytes::mib(101), Stream::DEFAULT));
            error.torch = TorchRelease(major, minor);
            let text = error.to_string();
            let advice = text
                .split_once(" is reserved by PyTorch but unallocated.")
                .unwrap()
                .1;
            let expected = format!("{expected} The largest free block has 0 bytes.");
            assert_eq!(advice, expected, "{major}.{minor}, {config}");
        }
    }
}

#[test]
fn memory_in_private_pools_is_named() -> Result<(), AllocError> {
    let mut allocator = allocator(&Config::default(), Bytes::mib(100));
    let pool = MempoolId(1, 0);
    let block = allocator.allocate_in(pool, Bytes::mib(40), Stream::DEFAULT)?;
    allocator.free(block)?;
    allocator.allocate_in(pool, Bytes::mib(3), Stream::DEFAULT)?;
    let error = out_of_memory(allocator.allocate(Bytes::mib(70), Stream::DEFAULT));
    assert_eq!(error.free_in_private_pools, Bytes::mib(37));
    assert!(
        error
            .to_string()
            .contains("with 37.00 MiB allocated in private pools (e.g., CUDA Graphs), ")
    );
    Ok(())
}

#[test]
fn regions_that_are_paused_are_named() -> Result<(), AllocError> {
    let mut allocator = allocator(&Config::default(), Bytes::mib(100));
    allocator.allocate(Bytes::mib(3), Stream::DEFAULT)?;
    for (number, region) in [(1, "weights"), (2, "kv"), (3, "kv")] {
        let pool = MempoolId(number, number);
        allocator.allocate_in(pool, Bytes::mib(20), Stream::DEFAULT)?;
        allocator
            .lane_mut()
            .set_pool(pool, PoolSetting::Paused(Some(region.into())))?;
    }
    let error = out_of_memory(allocator.allocate(Bytes::mib(70), Stream::DEFAULT));
    let paused = [("kv", 40), ("weights", 20)];
    let paused = paused.map(|(region, mib)| (region.into(), Bytes::mib(mib)));
    assert_eq!(error.paused, paused);
    let text = " The largest free block has 17.00 MiB. Paused, and not on the device: 40.00 MiB of region \
                \"kv\", 20.00 MiB of region \"weights\".\nBiggest holders: 1 x 3.00 MiB.";
    assert!(error.to_string().ends_with(text), "{error}");
    Ok(())
}

#[test]
fn the_fields_are_those_of_the_moment() -> Result<(), AllocError> {
    for config in configs() {
        let mut allocator = allocator(&config, Bytes::mib(128));
        let block = allocator.allocate(Bytes::mib(5), Stream(1))?;
        allocator.allocate(Bytes::mib(5), Stream(1))?;
        allocator.free(block)?;
        allocator.set_limit(Some(Bytes::mib(100)));
        let error = out_of_memory(allocator.allocate(Bytes::mib(127), Stream(1)));
        let stats = allocator.stats();
        assert_eq!(error.device, 3);
        assert_eq!(error.requested, Bytes::mib(127));
        assert_eq!(
            (error.allocated, error.reserved),
            (stats.allocated(), stats.reserved()),
            "{config}"
        );
        assert_eq!(
            (error.limit, error.device_total),
            (Some(Bytes::mib(100)), Bytes::mib(128))
        );
        let device = allocator.driver();
        let in_use = device.allocated_bytes() + device.created_bytes();
        assert_eq!(error.device_free, Bytes::mib(128) - in_use, "{config}");
        assert_eq!(stats.num_ooms, 1);
    }
    Ok(())
}

#[test]
fn more_than_there_can_be_is_refused_before_anything_else() {
    for config in configs() {
        let mut allocator = allocator(&config, Bytes::mib(128));
        for requested in [Bytes(Bytes::REQUEST_MAX.get() + 1), Bytes(u64::MAX)] {
            let error = allocator.allocate(requested, Stream::DEFAULT).unwrap_err();
            assert_eq!(error, AllocError::TooLarge { requested });
            let text = format!(
                "CUDA out of memory. Tried to allocate more than 1EB memory. {} bytes were asked for",
                requested.get()
            );
            assert_eq!(error.to_string(), text);
        }
        assert_eq!(
            allocator.driver().physical_bytes_max(),
            Bytes::ZERO,
            "{config}"
        );
        out_of_memory(allocator.allocate(Bytes::REQUEST_MAX, Stream::DEFAULT));
    }
}

#[test]
fn zero_bytes_are_nowhere() -> Result<(), AllocError> {
    let mut allocator = allocator(&Config::default(), Bytes::mib(128));
    assert_eq!(
        allocator.allocate(Bytes::ZERO, Stream::DEFAULT)?,
        DeviceAddress::NULL
    );
    allocator
        .lane_mut()
        .record_stream(DeviceAddress::NULL, Stream(1))?;
    allocator.free(DeviceAddress::NULL)?;
    assert_eq!(allocator.stats().allocation.all.allocated, 0);
    Ok(())
}

#[test]
fn what_is_not_held_cannot_be_freed() -> Result<(), AllocError> {
    for config in configs() {
        let mut allocator = allocator(&config, Bytes::mib(128));
        let block = allocator.allocate(Bytes::mib(1), Stream(1))?;
        for address in [block + Bytes(512), DeviceAddress(1)] {
            assert_eq!(
                allocator.free(address),
                Err(AllocError::NotAllocated { address }),
                "{config}"
            );
        }
        allocator.lane_mut().record_stream(block, Stream(2))?;
        allocator.driver().launch(Stream(2), u64::MAX / 4);
        allocator.free(block)?;
        let twice = allocator.free(block).unwrap_err();
        assert_eq!(
            twice,
            AllocError::NotAllocated { address: block },
            "{config}: it still waits"
        );
        let text =
            format!("{block} is not an allocated block: it was freed before or never handed out");
        assert_eq!(twice.to_string(), text);
    }
    Ok(())
}

#[test]
fn a_failing_driver_is_quoted() {
    let broken = DriverError::Failed {
        call: "cudaMalloc",
        code: 700,
        message: "an illegal access".into(),
    };
    let mut allocator = allocator(&Config::default(), Bytes::mib(128));
    allocator
        .driver()
        .set_faults(FaultPlan::nth(Call::Allocate, 1, broken.clone()));
    let error = allocator
        .allocate(Bytes::mib(1), Stream::DEFAULT)
        .unwrap_err();
    assert_eq!(error, AllocError::Driver(broken));
    assert!(!error.is_out_of_memory());
    assert_eq!(
        error.to_string(),
        "cudaMalloc failed with error 700: an illegal access"
    );
    assert!(error.source().is_none(), "so that nobody prints it twice");
    assert!(
        allocator.allocate(Bytes::mib(1), Stream::DEFAULT).is_ok(),
        "the next one is served"
    );
}

/// A region's source of memory: consecutive addresses from this one on.
struct OfRegion(DeviceAddress);

impl SegmentSource for OfRegion {
    fn allocate(&mut self, size: Bytes, _: Stream, _: bool) -> Option<DeviceAddress> {
        let address = self.0;
        self.0 = address + size;
        Some(address)
    }

    fn release(&mut self, _: DeviceAddress, _: Bytes) {}

    fn region(&self) -> Option<&Arc<str>> {
        static NAME: LazyLock<Arc<str>> = LazyLock::new(|| "kv".into());
        Some(&NAME)
    }
}

#[test]
fn holders_in_a_region_say_its_name() -> Result<(), AllocError> {
    let mut allocator = allocator(&Config::default(), Bytes::gib(1));
    let pool = MempoolId(0, 7);
    allocator.lane_mut().create_or_retain_pool(pool);
    allocator.lane_mut().set_pool(
        pool,
        PoolSetting::Source(Box::new(OfRegion(DeviceAddress(1 << 60)))),
    )?;
    allocator.allocate(Bytes::mib(30), Stream::DEFAULT)?;
    for _ in 0..2 {
        allocator.allocate_in(pool, Bytes::mib(30), Stream::DEFAULT)?;
    }
    let error = allocator.allocate(Bytes::gib(2), Stream::DEFAULT);
    let text = error.unwrap_err().to_string();
    let named = "\nBiggest holders: 2 x 30.00 MiB in region \"kv\", 1 x 30.00 MiB.";
    assert!(text.ends_with(named), "{text}");
    Ok(())
}

#[test]
fn the_biggest_holders_are_named() -> Result<(), AllocError> {
    let mut allocator = allocator(&Config::default(), Bytes::gib(1));
    for (count, kib) in [
        (3, 1024),
        (1, 40 << 10),
        (2, 7),
        (1, 2 << 10),
        (1, 1),
        (5, 30),
        (1, 300),
    ] {
        for _ in 0..count {
            allocator.allocate(Bytes::kib(kib), Stream::DEFAULT)?;
        }
    }
    let freed = allocator.allocate(Bytes::mib(100), Stream::DEFAULT)?;
    allocator.free(freed)?;
    let text = |allocator: &mut DeviceAllocator<SimDriver>| {
        let error = allocator.allocate(Bytes::gib(2), Stream::DEFAULT);
        error.unwrap_err().to_string()
    };
    let named = "\nBiggest holders: 1 x 40.00 MiB, 3 x 1.00 MiB, 1 x 2.00 MiB, 1 x 300.00 KiB, \
                 5 x 30.00 KiB; 2 more sizes hold 15.00 KiB.";
    assert!(
        text(&mut allocator).ends_with(named),
        "{}",
        text(&mut allocator)
    );
    allocator.allocate(Bytes::mib(40), Stream(0x7f))?;
    let named = "\nBiggest holders: 1 x 40.00 MiB on stream 0x0, 1 x 40.00 MiB on stream 0x7f, 3 x";
    assert!(
        text(&mut allocator).contains(named),
        "{}",
        text(&mut allocator)
    );
    Ok(())
}
