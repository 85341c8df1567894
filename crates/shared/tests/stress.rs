//! Threads on streams of their own that free each other's blocks, with a shadow of who holds what.
//!
//! `LOWTIDE_STRESS_OPERATIONS` sets how many requests each thread makes.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test of one function, in parts"
)]

use std::env;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use lowtide_core::{Bytes, CheckLevel, Config, DeviceAddress, Stream};
use lowtide_shared::SharedAllocator;
use lowtide_sim::{SimConfig, SimDriver};

const THREADS: usize = 16;
const CAPACITY: Bytes = Bytes::gib(2);
/// Blocks are told apart in units of this.
const UNIT: u64 = 512;
/// The simulator gives out addresses from multiples of this on.
const START: u64 = 1 << 44;
/// How much of the address space has a shadow: expandable segments reserve more than there is memory.
const SHADOW_UNITS: usize = 1 << 28;

/// Which units of memory are held, by a byte each.
struct Shadow(Vec<AtomicU8>);

impl Shadow {
    fn change(&self, address: DeviceAddress, size: u64, from: u8, to: u8) {
        let first = usize::try_from(address.get() % START / UNIT).unwrap();
        let count = usize::try_from(size.div_ceil(UNIT)).unwrap();
        // Blocks overlap in their first units or their last ones, if at all.
        let ends = [first, first + count - 1];
        for unit in &ends[..count.min(2)] {
            let before = self.0[*unit].swap(to, Ordering::Relaxed);
            assert_eq!(before, from, "{address}, {size} bytes");
        }
    }
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// What one thread does: holds some blocks, swaps some with a place that all threads share.
fn work(
    allocator: &SharedAllocator<SimDriver>,
    shadow: &Shadow,
    places: &[Mutex<Option<(DeviceAddress, u64)>>],
    number: u64,
    operations: u64,
) {
    let (mut seed, mut held) = (number + 1, Vec::new());
    let free = |(address, size): (DeviceAddress, u64)| {
        shadow.change(address, size, 1, 0);
        allocator.free(address).unwrap();
    };
    for _ in 0..operations {
        let choice = random(&mut seed);
        let size = match choice % 64 {
            0 => choice >> 16 & ((4 << 20) - 1),
            1..8 => choice >> 16 & ((1 << 20) - 1),
            _ => choice >> 16 & 0xffff,
        } + 1;
        let stream = Stream(number * 0x100);
        let address = allocator.allocate(Bytes(size), stream).unwrap();
        shadow.change(address, size, 0, 1);
        held.push((address, size));
        if choice >> 8 & 15 == 0 {
            // Used on another stream, and freed later by whichever thread finds it.
            let other = Stream((choice >> 12 & 15) * 0x100);
            allocator
                .with_block(address, |lane| lane.record_stream(address, other))
                .unwrap();
        }
        let place = &places[choice as usize >> 20 & 63];
        if choice >> 28 & 3 == 0 {
            let block = held.swap_remove((choice as usize >> 32) % held.len());
            let found = place.lock().unwrap().replace(block);
            found.into_iter().for_each(free);
        } else if held.len() > 40 {
            free(held.swap_remove(choice as usize >> 32 & 31));
        }
        if choice >> 40 & 0x3fff == 0 {
            allocator.empty_cache().unwrap();
        }
        if choice >> 40 & 0x3ff == 1 {
            let stats = allocator.stats().unwrap();
            assert!(stats.allocated() <= stats.reserved());
        }
    }
    held.into_iter().for_each(free);
}

#[test]
fn threads_on_streams_of_their_own_free_each_others_blocks() {
    let operations =
        env::var("LOWTIDE_STRESS_OPERATIONS").map_or(4_000, |text| text.parse().expect("a number"));
    let shadow = Shadow((0..SHADOW_UNITS).map(|_| AtomicU8::new(0)).collect());
    for config in [
        "caching",
        "caching:expandable_segments:True",
        "slab:arena_size_mb:64",
    ] {
        let config: Config = config.parse().unwrap();
        let driver = SimDriver::new(SimConfig {
            capacity: Some(CAPACITY),
            ..SimConfig::default()
        });
        let allocator = SharedAllocator::new(driver, 0, &config, Arc::default());
        let places: Vec<_> = (0..64).map(|_| Mutex::new(None)).collect();
        thread::scope(|scope| {
            for number in 0..THREADS as u64 {
                let (allocator, shadow, places) = (&allocator, &shadow, &places);
                scope.spawn(move || work(allocator, shadow, places, number, operations));
            }
        });
        for (address, size) in places
            .into_iter()
            .filter_map(|place| place.into_inner().unwrap())
        {
            shadow.change(address, size, 1, 0);
            allocator.free(address).unwrap();
        }
        allocator.empty_cache().unwrap();
        let stats = allocator.stats().unwrap();
        assert_eq!(
            (stats.allocated(), stats.reserved()),
            (Bytes::ZERO, Bytes::ZERO)
        );
        assert_eq!(
            stats.allocation.all.allocated,
            16 * i64::try_from(operations).unwrap()
        );
        assert_eq!(stats.allocation.all.freed, stats.allocation.all.allocated);
        assert_eq!(allocator.check_invariants(CheckLevel::Everything), Ok(()));
        let [violations, leaks] =
            allocator.with_driver(|driver| [driver.violations().to_vec(), driver.leaks()]);
        assert!(
            violations.is_empty() && leaks.is_empty(),
            "{violations:?} {leaks:?}"
        );
    }
}
