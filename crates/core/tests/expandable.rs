//! The choice of a free block in expandable segments.

use lowtide_core::{BlockStatus, Bytes, Config, DeviceAddress, DeviceAllocator, Stream};
use lowtide_sim::{Call, SimConfig, SimDriver};
use proptest::prelude::*;

type Allocator = DeviceAllocator<SimDriver>;

fn allocator() -> Allocator {
    let driver = SimDriver::new(SimConfig {
        capacity: Some(Bytes::gib(4)),
        ..SimConfig::default()
    });
    let config: Config = "caching:expandable_segments:True".parse().expect("options");
    DeviceAllocator::new(driver, 0, &config)
}

/// Returns the address of the next large request, if mapped memory serves it. It goes to the first free block,
/// sorted by size and address, that fits and could not grow larger than the next.
fn expected(allocator: &Allocator, request: Bytes) -> Option<DeviceAddress> {
    let segments = allocator.segments();
    let mapped: Vec<_> = { segments.iter() }.filter(|part| part.is_large).collect();
    let mut fitting = Vec::new();
    for (index, part) in mapped.iter().enumerate() {
        let end = part.address + part.size;
        // Behind the last part there are more addresses than any request needs.
        let next = mapped.get(index + 1).map(|next| next.address);
        let room = next.map_or(Bytes::gib(64), |next| next.offset_from(end));
        for block in &part.blocks {
            let is_last = block.address + block.size == end;
            if block.status == BlockStatus::Inactive && block.size >= request {
                let grown = block.size + if is_last { room } else { Bytes::ZERO };
                fitting.push((block.size, block.address, grown));
            }
        }
    }
    fitting.sort_unstable();
    let grows_less = |pair: &[(Bytes, DeviceAddress, Bytes)]| pair[1].2 < pair[0].2;
    let passed_over = { fitting.windows(2) }.take_while(|pair| grows_less(pair));
    let place = passed_over.count();
    fitting.get(place).map(|&(_, address, _)| address)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 1 } else { 200 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Blocks are allocated and freed, and free pages are unmapped meanwhile, so that there are gaps in the
    /// middle, too.
    #[test]
    fn a_block_that_could_grow_is_passed_over_for_a_larger_one_that_could_not(
        steps in prop::collection::vec((0..8_u8, 2..70_u64, any::<prop::sample::Index>()), 1..80),
    ) {
        let mut allocator = allocator();
        let mut live = Vec::new();
        for (kind, mib, which) in steps {
            match kind {
                0 => allocator.empty_cache(None)?,
                1..4 if !live.is_empty() => {
                    allocator.free(live.swap_remove(which.index(live.len())))?;
                }
                _ => {
                    let request = Bytes::mib(mib);
                    let expected = expected(&allocator, request);
                    let address = allocator.allocate(request, Stream::DEFAULT)?;
                    prop_assert_eq!(expected.unwrap_or(address), address);
                    live.push(address);
                }
            }
        }
    }
}

/// As in PyTorch: an address range is reserved for a request, but the device has no memory for it. The range
/// stays, and the next memory is mapped there if it is the lowest. If no other range has mapped memory, it is
/// released.
#[test]
fn a_range_that_nothing_was_mapped_into_stays() {
    let driver = SimDriver::new(SimConfig {
        capacity: Some(Bytes::mib(160)),
        ..SimConfig::default()
    });
    let config: Config = "caching:expandable_segments:True".parse().unwrap();
    let mut allocator = DeviceAllocator::new(driver, 0, &config);
    let first = allocator
        .allocate(Bytes::mib(100), Stream::DEFAULT)
        .unwrap();
    // The first range has 180 MiB, and 80 MiB of it are not mapped.
    let refused = allocator.allocate(Bytes::mib(100), Stream::DEFAULT);
    assert!(refused.is_err());
    let counted = |allocator: &mut Allocator| {
        [Call::Reserve, Call::Unreserve].map(|call| allocator.driver().stats(call).count)
    };
    assert_eq!(counted(&mut allocator), [2, 0]);
    allocator.empty_cache(None).unwrap();
    assert_eq!(counted(&mut allocator), [2, 0]);
    allocator.free(first).unwrap();
    allocator.empty_cache(None).unwrap();
    assert_eq!(counted(&mut allocator), [2, 2]);
}
