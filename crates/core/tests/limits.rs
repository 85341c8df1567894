//! Limits that are configured as a fraction of the device's memory.
#![expect(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use lowtide_core::{Bytes, Config, DeviceAllocator, Driver, Stream};
use lowtide_sim::{SimConfig, SimDriver};

fn allocator(conf: &str) -> DeviceAllocator<SimDriver> {
    let sim = SimConfig {
        capacity: Some(Bytes::gib(10)),
        ..SimConfig::default()
    };
    DeviceAllocator::new(
        SimDriver::new(sim),
        0,
        &Config::parse("caching", conf).unwrap(),
    )
}

#[test]
fn a_fraction_in_the_configuration_limits_what_is_reserved() {
    let mut allocator = allocator("per_process_memory_fraction:0.5");
    allocator.allocate(Bytes::gib(3), Stream::DEFAULT).unwrap();
    assert_eq!(allocator.limit(), Some(Bytes::gib(5)));
    let refused = allocator
        .allocate(Bytes::gib(3), Stream::DEFAULT)
        .unwrap_err();
    assert!(refused.is_out_of_memory());
    assert!(
        refused.to_string().contains("5.00 GiB allowed; "),
        "{refused}"
    );

    allocator.set_limit(None);
    allocator.allocate(Bytes::gib(3), Stream::DEFAULT).unwrap();
}

/// As in PyTorch from 2.10 on: a request above all of the device's memory is then rejected, not out of memory.
#[test]
fn all_of_the_device_is_no_limit() {
    let mut allocator = allocator("throw_on_cudamalloc_oom:True");
    for fraction in [1.0, 0.5, 1.0] {
        let limit = (fraction < 1.0).then(|| Bytes::gib(5));
        allocator.set_limit(limit);
        assert_eq!(allocator.limit(), limit);
        assert_eq!(allocator.memory_fraction(), Ok(fraction));
        let refused = allocator.allocate(Bytes::gib(11), Stream::DEFAULT);
        let text = refused.unwrap_err().to_string();
        assert_eq!(text.contains("5.00 GiB allowed"), limit.is_some(), "{text}");
    }
    let stats = allocator.stats();
    assert_eq!((stats.num_ooms, stats.num_oom_rejections), (1, 2));
}

/// Cached memory is released before a request needs it only if there are both a limit and a threshold.
#[test]
fn garbage_is_collected_above_a_part_of_a_limit() {
    let (threshold, fraction) = (
        "garbage_collection_threshold:0.2",
        "per_process_memory_fraction:0.5",
    );
    let both = format!("{threshold},{fraction}");
    for (conf, reserved) in [(threshold, 3), (fraction, 3), (&both, 1)] {
        let mut allocator = allocator(conf);
        let cached = allocator.allocate(Bytes::gib(2), Stream::DEFAULT).unwrap();
        allocator.free(cached).unwrap();
        allocator.allocate(Bytes::gib(1), Stream(1)).unwrap();
        assert_eq!(allocator.stats().reserved(), Bytes::gib(reserved), "{conf}");
    }
}

#[test]
fn a_limit_set_by_the_program_replaces_the_configured_one() {
    let mut allocator = allocator("per_process_memory_fraction:0.1");
    allocator.set_limit(None);
    allocator.allocate(Bytes::gib(8), Stream::DEFAULT).unwrap();
    assert_eq!(allocator.limit(), None);
}

/// As in PyTorch from 2.12 on, the limit is checked first, and a request that would exceed it releases cached
/// memory.
#[test]
fn what_the_device_is_not_to_hold_is_rejected() {
    let mut allocator = allocator("per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True");
    allocator.allocate(Bytes::gib(1), Stream::DEFAULT).unwrap();
    let cached = allocator.allocate(Bytes::gib(3), Stream::DEFAULT).unwrap();
    allocator.free(cached).unwrap();
    allocator.allocate(Bytes::gib(4), Stream::DEFAULT).unwrap();
    let stats = allocator.stats();
    assert_eq!((stats.num_device_free, stats.num_oom_rejections), (1, 0));

    // The program may set another limit; the configured one stays in force.
    allocator.set_limit(None);
    allocator.lane_mut().event_log().record(true);
    let refused = allocator.allocate(Bytes::gib(3), Stream::DEFAULT);
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("preemptively rejected"), "{text}");
    assert!(text.contains("Requested size: 3.00 GiB. "), "{text}");
    let stats = allocator.stats();
    assert_eq!((stats.num_device_free, stats.num_oom_rejections), (1, 1));
    assert_eq!(stats.num_ooms, 0);
    assert_eq!(allocator.lane_mut().event_log().take().count(), 0);
}

/// The error says whether the request was rejected, not whether it would be now, with an empty cache.
#[test]
fn a_request_that_had_the_cache_released_was_not_rejected() {
    let mut allocator = allocator("per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True");
    allocator.set_limit(Some(Bytes::gib(9)));
    allocator.allocate(Bytes::gib(2), Stream::DEFAULT).unwrap();
    let cached = allocator.allocate(Bytes::gib(2), Stream::DEFAULT).unwrap();
    allocator.free(cached).unwrap();
    // The request exceeds nine tenths with the cache, a half without it, and the driver's free memory.
    allocator.driver().allocate(Bytes::gib(3)).unwrap();
    let refused = allocator.allocate(Bytes::gib(6), Stream::DEFAULT);
    let text = refused.unwrap_err().to_string();
    assert!(!text.contains("preemptively rejected"), "{text}");
    let stats = allocator.stats();
    assert_eq!((stats.num_ooms, stats.num_oom_rejections), (1, 0));
    assert_eq!(stats.num_device_free, 1);
}

#[test]
fn without_a_configured_part_the_device_is_what_may_be_held() {
    for (conf, rejections) in [("", 0), ("throw_on_cudamalloc_oom:True", 1)] {
        let mut allocator = allocator(conf);
        allocator.allocate(Bytes::gib(6), Stream::DEFAULT).unwrap();
        let refused = allocator.allocate(Bytes::gib(5), Stream::DEFAULT);
        assert!(refused.unwrap_err().is_out_of_memory());
        let stats = allocator.stats();
        assert_eq!(stats.num_oom_rejections, rejections, "{conf}");
        assert_eq!(stats.num_ooms, 1 - rejections, "{conf}");
    }
}

#[test]
fn figures_name_the_private_pools() {
    use lowtide_core::{MempoolId, Stats};
    let mut allocator = allocator("");
    allocator
        .allocate_in(MempoolId(0, 7), Bytes::mib(30), Stream::DEFAULT)
        .unwrap();
    let figures: std::collections::BTreeMap<_, _> =
        allocator.stats().entries().into_iter().collect();
    let reserved = |figure: &str| figures[&format!("reserved_bytes_by_private_pools.0_7.{figure}")];
    assert_eq!(reserved("all.current"), 30 << 20);
    assert_eq!(reserved("large_pool.peak"), 30 << 20);
    assert_eq!(reserved("small_pool.allocated"), 0);
    assert_eq!(figures.len(), Stats::default().entries().len() + 12);
}
