//! A job that repeats gets the same addresses in each step.

use lowtide_core::{AllocError, Bytes, DeviceAddress, DeviceAllocator, Stream};
use lowtide_sim::{Call, SimDriver};
use proptest::prelude::*;

const KIB: u64 = 1 << 10;

/// A request, and how many more follow before its block is freed.
#[derive(Clone, Copy, Debug)]
struct Temporary {
    size: Bytes,
    requests: usize,
}

/// Returns requests that are kept for reuse when freed. Few sizes, so that blocks of a size are many.
fn temporaries() -> impl Strategy<Value = Vec<Temporary>> {
    let size = prop_oneof![
        4 => prop::sample::select(vec![512, 4 * KIB, 64 * KIB, 200 * KIB, 700 * KIB]),
        2 => 1..64 * KIB,
        1 => 64 * KIB..1024 * KIB,
    ];
    let temporary = (size, 0..60_usize).prop_map(|(size, requests)| Temporary {
        size: Bytes(size),
        requests,
    });
    prop::collection::vec(temporary, 1..150)
}

/// Makes the requests of a step and frees their blocks. Returns the addresses. After one of the requests, another thread
/// looks for idle memory, and makes a large request in a stream of its own.
fn step(
    allocator: &mut DeviceAllocator<SimDriver>,
    requests: &[Temporary],
    interrupted: usize,
) -> Result<Vec<DeviceAddress>, AllocError> {
    const LARGE: Bytes = Bytes::mib(2);
    let mut addresses = Vec::new();
    let mut live: Vec<(usize, DeviceAddress)> = Vec::new();
    for (now, request) in requests.iter().enumerate() {
        let address = allocator.allocate(request.size, Stream::DEFAULT)?;
        addresses.push(address);
        live.push((now + request.requests, address));
        let ended: Vec<_> = live.extract_if(.., |&mut (end, _)| end <= now).collect();
        for (_, address) in ended {
            allocator.free(address)?;
        }
        if now == interrupted % requests.len() {
            allocator.lane_mut().release_unused(0, Bytes::ZERO)?;
            let other = allocator.allocate(LARGE, Stream(1))?;
            allocator.free(other)?;
        }
    }
    for (_, address) in live {
        allocator.free(address)?;
    }
    Ok(addresses)
}

proptest! {
    // One program in some thousand moves frames in each step, until a limit ends that. Such a one is left out.
    #![proptest_config(ProptestConfig { max_global_rejects: 3, ..ProptestConfig::default() })]
    #[test]
    fn the_same_requests_get_the_same_addresses(
        requests in temporaries(),
        weights in temporaries(),
    ) {
        let config = "tide".parse().expect("the strategy exists");
        let mut allocator = DeviceAllocator::new(SimDriver::default(), 0, &config);
        for weight in weights {
            allocator.allocate(weight.size, Stream::DEFAULT).unwrap();
        }
        // The first steps need new memory, each at later requests than the one before. Then tide learns how little
        // memory the job uses between them.
        let first = 20 + 4000 / requests.len();
        for number in 0..first {
            step(&mut allocator, &requests, number * 7).unwrap();
        }
        let before = step(&mut allocator, &requests, first * 7).unwrap();
        let maps = allocator.driver().stats(Call::Map).count;
        for number in first + 1..first + 5 {
            let addresses = step(&mut allocator, &requests, number * 7).unwrap();
            prop_assume!(allocator.driver().stats(Call::Map).count == maps);
            prop_assert_eq!(addresses, before.clone());
        }
    }
}

/// What was freed recently counts as merged.
#[test]
fn the_largest_free_block_has_what_was_freed_recently() -> Result<(), AllocError> {
    for strategy in ["tide", "slab", "buddy"] {
        let config = strategy.parse().expect("the strategy exists");
        let mut allocator = DeviceAllocator::new(SimDriver::default(), 0, &config);
        let before = allocator.allocate(Bytes::kib(512), Stream::DEFAULT)?;
        let blocks = [(); 2].map(|()| allocator.allocate(Bytes::kib(512), Stream::DEFAULT));
        let largest = allocator.largest_request(Bytes::ZERO);
        for block in blocks {
            allocator.free(block?)?;
        }
        allocator.free(before)?;
        let freed = allocator.largest_request(Bytes::ZERO);
        assert!(
            freed > largest && freed >= Bytes::mib(2),
            "{strategy}: {freed}"
        );
    }
    Ok(())
}
