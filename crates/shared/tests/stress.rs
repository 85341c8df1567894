//! Threads that free each other's blocks, with a shadow that records which thread holds which memory.
//!
//! `LOWTIDE_STRESS_OPERATIONS` sets how many requests each thread makes.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test of one function, in parts"
)]

use std::env;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;

use lowtide_core::{Bytes, CheckLevel, Config, DeviceAddress, Stream};
use lowtide_shared::SharedAllocator;
use lowtide_sim::{SimConfig, SimDriver};

const THREADS: u64 = 16;
const CAPACITY: Bytes = Bytes::gib(1);
/// The unit in which the shadow tells blocks apart.
const UNIT: u64 = 512;
/// The simulator's addresses start at a multiple of this.
const START: u64 = 1 << 44;
/// A leaf of the shadow covers 2 MiB, in units.
const LEAF_UNITS: usize = 1 << 12;
/// How much of the address space has a shadow: expandable segments reserve more addresses than there is memory.
const LEAVES: usize = 1 << 20;

/// A block that a thread holds.
#[derive(Clone, Copy)]
struct Block {
    address: DeviceAddress,
    size: u64,
    /// Which thread it was allocated for, and by which of the thread's requests; never zero.
    stamp: u32,
}

/// The stamp of the block that each unit of memory is part of, or zero.
///
/// Stamps are swapped: if two threads hold the same unit, one finds the other's stamp. The orderings are the
/// weakest possible, so that the shadow adds no ordering that the allocator lacks.
struct Shadow(Vec<OnceLock<Box<[AtomicU32]>>>);

impl Shadow {
    fn new() -> Shadow {
        Shadow((0..LEAVES).map(|_| OnceLock::new()).collect())
    }

    fn hold(&self, block: &Block) {
        self.swap(block, 0, block.stamp);
    }

    fn free(&self, block: &Block) {
        self.swap(block, block.stamp, 0);
    }

    fn swap(&self, block: &Block, from: u32, to: u32) {
        let first = usize::try_from(block.address.get() % START / UNIT).unwrap();
        let count = usize::try_from(block.size.div_ceil(UNIT)).unwrap();
        for unit in first..first + count {
            let leaf = self.0[unit / LEAF_UNITS]
                .get_or_init(|| (0..LEAF_UNITS).map(|_| AtomicU32::new(0)).collect());
            let before = leaf[unit % LEAF_UNITS].swap(to, Ordering::Relaxed);
            let Block { address, size, .. } = block;
            assert_eq!(before, from, "unit {unit:#x} of {address}, {size} bytes");
        }
    }
}

/// What all threads of a test share.
struct Stress {
    allocator: SharedAllocator<SimDriver>,
    shadow: Shadow,
    /// Slots for blocks that any thread may take.
    places: Vec<Mutex<Option<Block>>>,
    /// Number of streams. Each thread has its own if there are as many as threads.
    streams: u64,
    operations: u64,
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn stream(number: u64) -> Stream {
    Stream(number * 0x100)
}

impl Stress {
    fn new(config: &str, streams: u64, operations: u64) -> Stress {
        let config: Config = config.parse().unwrap();
        let driver = SimDriver::new(SimConfig {
            capacity: Some(CAPACITY),
            ..SimConfig::default()
        });
        Stress {
            allocator: SharedAllocator::new(driver, 0, &config, Arc::default(), None),
            shadow: Shadow::new(),
            places: (0..64).map(|_| Mutex::new(None)).collect(),
            streams,
            operations,
        }
    }

    /// One thread's work: it holds some blocks and swaps some with slots that all threads share.
    fn work(&self, number: u64) {
        let (mut seed, mut held) = (number + 1, Vec::new());
        for operation in 0..self.operations {
            let choice = random(&mut seed);
            held.push(self.allocate(number, operation, choice));
            let place = &self.places[choice as usize >> 20 & 63];
            if choice >> 28 & 3 == 0 {
                let block = held.swap_remove((choice as usize >> 32) % held.len());
                let found = place.lock().unwrap().replace(block);
                found.iter().for_each(|block| self.free(block));
            } else if held.len() > 40 {
                self.free(&held.swap_remove(choice as usize >> 32 & 31));
            }
            self.manage(choice);
        }
        held.iter().for_each(|block| self.free(block));
    }

    fn allocate(&self, number: u64, operation: u64, choice: u64) -> Block {
        let size = match choice % 64 {
            0 => choice >> 16 & ((4 << 20) - 1),
            1..8 => choice >> 16 & ((1 << 20) - 1),
            _ => choice >> 16 & 0xffff,
        } + 1;
        let own = if self.streams == THREADS {
            number
        } else {
            (choice >> 48) % self.streams
        };
        let address = self
            .allocator
            .allocate(Bytes(size), stream(own), || Ok(false))
            .unwrap();
        let stamp = (number + 1) << 27 | operation & ((1 << 27) - 1);
        let stamp = stamp as u32;
        let block = Block {
            address,
            size,
            stamp,
        };
        self.shadow.hold(&block);
        if choice >> 8 & 15 == 0 {
            // Used on another stream, and freed later by any thread.
            let other = stream((choice >> 12) % self.streams);
            let recorded = self
                .allocator
                .with_block(address, |lane| lane.record_stream(address, other));
            recorded.unwrap();
        }
        block
    }

    fn free(&self, block: &Block) {
        self.shadow.free(block);
        self.allocator
            .with_block(block.address, |lane| lane.free(block.address))
            .unwrap();
    }

    /// Makes a call that concerns the whole device, now and then.
    fn manage(&self, choice: u64) {
        match choice >> 40 & 0x3fff {
            0 => self
                .allocator
                .with_all(|device| device.empty_cache(None))
                .unwrap()
                .unwrap(),
            1 => drop(self.allocator.with_all(|device| device.snapshot()).unwrap()),
            2..16 => {
                let stats = self.allocator.with_all(|device| device.stats()).unwrap();
                assert!(stats.allocated() <= stats.reserved());
                assert!(stats.reserved() <= CAPACITY);
            }
            _ => {}
        }
    }

    fn run(&self) {
        thread::scope(|scope| {
            for number in 0..THREADS {
                scope.spawn(move || self.work(number));
            }
        });
        let left = self
            .places
            .iter()
            .filter_map(|place| *place.lock().unwrap());
        left.for_each(|block| self.free(&block));
        self.allocator
            .with_all(|device| device.empty_cache(None))
            .unwrap()
            .unwrap();
        let stats = self.allocator.with_all(|device| device.stats()).unwrap();
        assert_eq!([stats.allocated(), stats.reserved()], [Bytes::ZERO; 2]);
        let requests = i64::try_from(THREADS * self.operations).unwrap();
        let allocation = stats.allocation.all;
        assert_eq!([allocation.allocated, allocation.freed], [requests; 2]);
        let checked = self.allocator.for_each_lane(|lane| {
            lane.check_invariants(CheckLevel::Everything).unwrap();
            Ok(())
        });
        assert_eq!(checked, Ok(()));
        let physical = self.allocator.physical();
        let [violations, leaks] = [
            physical.driver().violations().to_vec(),
            physical.driver().leaks(),
        ];
        assert_eq!([violations, leaks], [const { Vec::<String>::new() }; 2]);
    }
}

fn stress(config: &str, streams: u64) {
    let operations =
        env::var("LOWTIDE_STRESS_OPERATIONS").map_or(2_000, |text| text.parse().expect("a number"));
    Stress::new(config, streams, operations).run();
}

#[test]
fn threads_on_streams_of_their_own() {
    stress("caching", THREADS);
}

/// More streams than there are lanes, each used by all threads.
#[test]
fn threads_on_any_of_forty_streams() {
    stress("caching", 40);
}

#[test]
fn threads_on_expandable_segments() {
    stress("caching:expandable_segments:True", THREADS);
}

#[test]
fn threads_on_any_of_forty_streams_and_expandable_segments() {
    stress("caching:expandable_segments:True", 40);
}

#[test]
fn threads_on_size_classes() {
    stress("slab:arena_size_mb:16", THREADS);
}

#[test]
fn threads_on_pages_that_change_streams() {
    stress("tide", THREADS);
}

#[test]
fn threads_on_any_of_forty_streams_and_pages_that_change_streams() {
    stress("tide", 40);
}
