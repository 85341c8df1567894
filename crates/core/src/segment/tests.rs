use super::*;
use crate::check::CheckLevel;
use crate::config::Config;
use crate::device::DeviceAllocator;
use crate::error::AllocError;
use crate::physical::Physical;
use crate::strategy::test_driver::TestDriver;
use crate::units::Stream;

/// All but `bfc`, whose regions are powers of two that shrink by tenths.
const EXACT: [&str; 5] = ["direct", "pool", "buddy", "slab", "caching"];

/// A device larger than any, whose allocations are adjacent and join.
fn allocator(strategy: &str) -> DeviceAllocator<TestDriver> {
    let config: Config = strategy.parse().unwrap();
    DeviceAllocator::new(TestDriver::new(Bytes(1 << 62)), 0, &config)
}

#[test]
fn the_largest_segment_is_served_to_the_byte_and_nothing_larger() {
    for strategy in EXACT {
        let mut allocator = allocator(strategy);
        let more = Bytes(Bytes::SEGMENT_MAX.get() + 1);
        let error = allocator.allocate(more, Stream::DEFAULT).unwrap_err();
        assert!(error.is_out_of_memory(), "{strategy}: {error}");
        assert!(allocator.segments().is_empty(), "{strategy}");
        let block = allocator.allocate(Bytes::SEGMENT_MAX, Stream::DEFAULT);
        let block = block.unwrap_or_else(|error| panic!("{strategy}: {error}"));
        let allocation = allocator.lane().allocation(block).unwrap();
        let sizes = (allocation.size, allocation.requested);
        assert_eq!(
            sizes,
            (Bytes::SEGMENT_MAX, Bytes::SEGMENT_MAX),
            "{strategy}"
        );
        allocator
            .lane()
            .check_invariants(CheckLevel::Everything)
            .unwrap();
        allocator.free(block).unwrap();
        allocator
            .lane()
            .check_invariants(CheckLevel::Everything)
            .unwrap();
    }
}

/// The driver has no addresses to give, so that its answer says whether it was asked.
#[test]
fn the_driver_is_asked_for_the_addresses_of_the_largest_segment_and_for_no_more() {
    // The device's memory and an eighth of it, in whole pages of 2 MiB.
    let largest = Bytes::SEGMENT_MAX.get() / 9 * 8;
    for (total, is_asked) in [(largest, true), (largest + (2 << 20), false)] {
        let config = Config::parse("caching", "expandable_segments:True").unwrap();
        let mut driver = TestDriver::new(Bytes(total));
        driver.claims_virtual_memory = true;
        let mut allocator = DeviceAllocator::new(driver, 0, &config);
        let error = allocator.allocate(Bytes(1), Stream::DEFAULT).unwrap_err();
        let call = "reserve";
        let answer = AllocError::Driver(DriverError::Unsupported { call });
        assert_eq!(error == answer, is_asked, "{total}: {error}");
        assert_eq!(error.is_out_of_memory(), !is_asked, "{total}: {error}");
        assert!(allocator.segments().is_empty(), "{total}");
        allocator
            .lane()
            .check_invariants(CheckLevel::Everything)
            .unwrap();
    }
}

#[test]
fn a_domain_has_memory_as_long_as_the_driver_refuses_to_take_it_back() {
    let mut heap = Heap::new(0);
    let mut memory = Physical::new(TestDriver::new(Bytes::gib(1)), None);
    let ids = [1, 2].map(|stream| {
        let domain = heap
            .domains
            .find_or_insert(PoolIndex::DEFAULT, Stream(stream));
        domain.unwrap()
    });
    assert_eq!(heap.domains_without_memory(&memory), ids);
    // The driver of this test refuses to release handles.
    let page_size = Bytes::mib(2);
    let handle = memory.create(page_size).unwrap();
    let owner = heap.owner(ids[1], SizeKind::Small);
    let mut counted = 0;
    memory.release_pages(vec![handle], owner, &mut |_, change| {
        counted += change;
    });
    assert_eq!(counted, signed(page_size));
    assert_eq!(heap.spare_bytes(&memory), page_size);
    assert_eq!(heap.domains_without_memory(&memory), [ids[0]]);
}
