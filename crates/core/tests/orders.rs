//! The order of free blocks of the same size in `caching`, as in PyTorch's releases.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its table fails"
)]

use std::collections::BTreeMap;

use lowtide_core::{
    AllocError, Bytes, CheckLevel, Config, DeviceAddress, DeviceAllocator, DriverError,
    FreeBlockOrder, Stream, TorchRelease,
};
use lowtide_sim::{AddressSource, FirstFit, SimConfig, SimDriver};

const ORDERS: [FreeBlockOrder; 3] = FreeBlockOrder::ALL;

/// Allocates segments at the lowest free address, and reserves address ranges 1 TiB apart.
struct Apart {
    segments: FirstFit,
    reserved: u64,
}

impl AddressSource for Apart {
    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        self.segments.allocate(size)
    }

    fn freed(&mut self, address: DeviceAddress, size: Bytes) {
        self.segments.freed(address, size);
    }

    fn reserve(&mut self, _size: Bytes) -> Result<DeviceAddress, DriverError> {
        self.reserved += 1;
        Ok(DeviceAddress((1 << 48) + (self.reserved << 40)))
    }

    fn unreserved(&mut self, _address: DeviceAddress, _size: Bytes) {}
}

fn caching(order: FreeBlockOrder, conf: &str) -> DeviceAllocator<SimDriver<Apart>> {
    let config = SimConfig {
        capacity: Some(Bytes::mib(256)),
        ..SimConfig::default()
    };
    let addresses = Apart {
        segments: FirstFit::new(),
        reserved: 0,
    };
    let driver = SimDriver::with_addresses(config, addresses);
    let config = format!("caching:free_block_order:{}{conf}", order.name());
    DeviceAllocator::new(driver, 0, &config.parse::<Config>().unwrap())
}

fn allocate(allocator: &mut DeviceAllocator<SimDriver<Apart>>, size: Bytes) -> DeviceAddress {
    allocator.allocate(size, Stream::DEFAULT).unwrap()
}

/// Runs one program of the table and returns the address of each allocation, with `order` and in PyTorch.
fn addresses(program: &str, order: FreeBlockOrder) -> (Vec<String>, Vec<String>) {
    let (header, steps) = program.split_once('\n').unwrap();
    let conf = header.split_once(' ').map_or("", |(_, conf)| conf);
    let mut allocator = caching(order, conf);
    let (mut slots, mut first) = (BTreeMap::new(), None);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for line in steps.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        match fields[0] {
            "F" => {
                if let Some(address) = slots.remove(fields[1]) {
                    allocator.free(address).unwrap();
                }
            }
            "E" => allocator.empty_cache(None).unwrap(),
            _ => {
                let (stream, size) = (fields[2].parse().unwrap(), fields[3].parse().unwrap());
                let text = match allocator.allocate(Bytes(size), Stream(stream)) {
                    Ok(address) => {
                        slots.insert(fields[1], address);
                        let first = *first.get_or_insert(address);
                        format!("{:x}", address.get() - first.get())
                    }
                    Err(AllocError::OutOfMemory(_)) => "oom".to_owned(),
                    Err(error) => panic!("{line}: {error}"),
                };
                ours.push(text);
                theirs.push(fields[4 + order as usize].to_owned());
            }
        }
        allocator
            .lane()
            .check_invariants(CheckLevel::Everything)
            .unwrap();
    }
    (ours, theirs)
}

#[test]
fn random_programs_get_the_addresses_of_each_release() {
    let table = include_str!("torch_orders.tsv");
    let programs: Vec<&str> = table.split("program ").skip(1).collect();
    assert_eq!(programs.len(), 4);
    for program in programs {
        let answers = ORDERS.map(|order| addresses(program, order));
        for (order, (ours, theirs)) in ORDERS.into_iter().zip(&answers) {
            assert_eq!(ours, theirs, "{order:?}");
        }
        // The table distinguishes the orders. In a single expandable segment, address and segment age give the
        // same.
        let grows = program.contains("expandable_segments");
        assert!(answers[0] != answers[1] && answers[1] != answers[2]);
        assert!(grows || answers[0] != answers[2]);
    }
}

#[test]
fn of_two_segments_the_older_comes_first_from_2_12_on() {
    for (order, takes_older) in ORDERS.into_iter().zip([false, true, true]) {
        let mut allocator = caching(order, "");
        let gone = allocate(&mut allocator, Bytes::mib(12));
        let older = allocate(&mut allocator, Bytes::mib(12));
        allocator.free(gone).unwrap();
        allocator.empty_cache(None).unwrap();
        let newer = allocate(&mut allocator, Bytes::mib(12));
        assert!(newer < older, "the driver takes the lowest address");
        allocator.free(older).unwrap();
        allocator.free(newer).unwrap();
        let expected = if takes_older { older } else { newer };
        assert_eq!(
            allocate(&mut allocator, Bytes::mib(12)),
            expected,
            "{order:?}"
        );
    }
}

#[test]
fn of_two_blocks_of_a_segment_2_12_takes_the_one_that_was_cut_last() {
    for (order, takes_rest) in ORDERS.into_iter().zip([false, true, false]) {
        let mut allocator = caching(order, "");
        let quarters = [(); 4].map(|()| allocate(&mut allocator, Bytes::kib(512)));
        allocator.free(quarters[0]).unwrap();
        allocator.free(quarters[3]).unwrap();
        let expected = if takes_rest { quarters[3] } else { quarters[0] };
        assert_eq!(
            allocate(&mut allocator, Bytes::kib(512)),
            expected,
            "{order:?}"
        );
    }
}

/// For recordings that do not have the ages of blocks.
#[test]
fn blocks_can_be_said_to_be_older() {
    for (order, has_ages) in ORDERS.into_iter().zip([false, true, false]) {
        let mut allocator = caching(order, "");
        let quarters = [(); 4].map(|()| allocate(&mut allocator, Bytes::kib(512)));
        let segment = allocate(&mut allocator, Bytes::mib(12));
        for place in [0, 2] {
            allocator.free(quarters[place]).unwrap();
        }
        let numbers: BTreeMap<DeviceAddress, u64> = allocator.lane().block_numbers().collect();
        let expected = quarters.into_iter().chain([segment]).zip([2, 3, 4, 1, 5]);
        assert_eq!(
            numbers,
            expected.filter(|_| has_ages).collect(),
            "{order:?}"
        );

        allocator
            .lane_mut()
            .order_blocks(&[segment, quarters[2], quarters[0]]);
        allocator
            .lane()
            .check_invariants(CheckLevel::Everything)
            .unwrap();
        let numbers: BTreeMap<DeviceAddress, u64> = allocator.lane().block_numbers().collect();
        let expected = quarters.into_iter().chain([segment]).zip([3, 5, 2, 4, 1]);
        assert_eq!(
            numbers,
            expected.filter(|_| has_ages).collect(),
            "{order:?}"
        );

        let taken = if has_ages { quarters[2] } else { quarters[0] };
        assert_eq!(
            allocate(&mut allocator, Bytes::kib(512)),
            taken,
            "{order:?}"
        );
        // A later block is younger than all of them.
        allocator.free(taken).unwrap();
        let part = allocate(&mut allocator, Bytes::kib(256));
        let newest = allocator
            .lane()
            .block_numbers()
            .max_by_key(|&(_, number)| number);
        assert_eq!(newest.map(|(address, _)| address), has_ages.then_some(part));
        allocator
            .lane()
            .check_invariants(CheckLevel::Everything)
            .unwrap();
    }
}

#[test]
fn the_order_of_blocks_that_are_listed_is_not_changed() {
    let config: Config = "caching:free_block_order:segment_age".parse().unwrap();
    assert_eq!(
        config
            .reconfigured("max_split_size_mb:64", None)
            .unwrap()
            .to_conf(),
        "max_split_size_mb:64,free_block_order:segment_age"
    );
    let error = config
        .reconfigured("free_block_order:address", None)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "free_block_order cannot be changed while memory is allocated in another"
    );
    let error = "caching:free_block_order:size"
        .parse::<Config>()
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "free_block_order is address, block_age or segment_age, not size"
    );
}

#[test]
fn releases_have_their_orders() {
    let orders = [(1, 13), (2, 11), (2, 12), (2, 13), (3, 0)]
        .map(|(major, minor)| FreeBlockOrder::of_torch(TorchRelease(major, minor)));
    let [address, block, segment] = ORDERS;
    assert_eq!(orders, [address, address, block, segment, segment]);
}

/// PyTorch has 31 bits for the number of a segment.
#[test]
fn segments_are_numbered_one_by_one_however_large() {
    let mut allocator = caching(FreeBlockOrder::SegmentAge, "");
    for size in [12, 64, 100] {
        allocate(&mut allocator, Bytes::mib(size));
    }
    let mut numbers: Vec<u64> = allocator
        .segment_numbers()
        .into_iter()
        .map(|(_, number)| number)
        .collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [1, 2, 3]);
}
