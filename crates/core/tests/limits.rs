//! Limits from the configuration, which only the device can turn into bytes.
#![expect(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use lowtide_core::{Bytes, Config, DeviceAllocator, Stream};
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

    allocator.set_memory_fraction(1.0).unwrap();
    allocator.allocate(Bytes::gib(3), Stream::DEFAULT).unwrap();
}

#[test]
fn a_limit_set_by_the_program_replaces_the_configured_one() {
    let mut allocator = allocator("per_process_memory_fraction:0.1");
    allocator.set_limit(None);
    allocator.allocate(Bytes::gib(8), Stream::DEFAULT).unwrap();
    assert_eq!(allocator.limit(), None);
}

#[test]
fn rejections_come_before_anything_goes_back() {
    for (conf, released) in [("", 1), ("throw_on_cudamalloc_oom:True", 0)] {
        let mut allocator = allocator(conf);
        allocator.set_limit(Some(Bytes::gib(4)));
        let cached = allocator.allocate(Bytes::gib(1), Stream::DEFAULT).unwrap();
        allocator.free(cached).unwrap();
        allocator
            .allocate(Bytes::gib(5), Stream::DEFAULT)
            .unwrap_err();
        let stats = allocator.stats();
        assert_eq!(stats.num_device_free, released, "{conf}");
        assert_eq!(stats.num_oom_rejections, 1 - released, "{conf}");
        assert_eq!(stats.num_ooms, 1);
    }
}

#[test]
fn figures_name_the_private_pools() {
    use lowtide_core::MempoolId;
    let mut allocator = allocator("");
    allocator
        .allocate_in(MempoolId(0, 7), Bytes::mib(30), Stream::DEFAULT)
        .unwrap();
    let figures: std::collections::BTreeMap<_, _> = allocator.memory_stats().into_iter().collect();
    let reserved = |figure: &str| figures[&format!("reserved_bytes_by_private_pools.0_7.{figure}")];
    assert_eq!(reserved("all.current"), 30 << 20);
    assert_eq!(reserved("large_pool.peak"), 30 << 20);
    assert_eq!(reserved("small_pool.allocated"), 0);
    assert_eq!(figures.len(), allocator.stats().entries().len() + 12);
}
