//! A device whose streams are served by lanes, and threads that make every call that a program may make.

use std::collections::BTreeMap;
use std::sync::Mutex;

use lowtide_core::{
    AllocError, Bytes, Config, DeviceAddress, Lane, MempoolId, Observer, PoolSetting, RouteOrder,
    StatsReset, Stream,
};
use lowtide_sim::{SimConfig, SimDriver};
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::Arc;
use shuttle::thread;

use super::check;
use super::shadow::{Shadow, Witness};
use crate::{LaneOf, SharedAllocator};

const MIB: u64 = 1 << 20;
/// How long work on a stream takes: longer than all calls of the driver in a test.
const WORK_NS: u64 = 1_000_000_000_000;

/// What the threads of a test do in addition to the common steps.
#[derive(Clone, Copy)]
pub(super) struct Program {
    pub(super) config: &'static str,
    pub(super) threads: u64,
    pub(super) steps: usize,
    pub(super) streams: u64,
    pub(super) capacity: Bytes,
    /// The largest limit that they ever set.
    pub(super) limit: Option<Bytes>,
    /// Whether there are captures and private pools.
    pub(super) captures: bool,
    pub(super) observes: bool,
}

impl Default for Program {
    fn default() -> Program {
        Program {
            config: "caching",
            threads: 3,
            steps: 10,
            streams: 5,
            capacity: Bytes::mib(96),
            limit: None,
            captures: false,
            observes: false,
        }
    }
}

/// A block that any thread may use and free.
struct Block {
    address: DeviceAddress,
    size: Bytes,
    /// The time until which work on other streams uses it.
    used_until_ns: u64,
}

struct World {
    program: Program,
    allocator: SharedAllocator<SimDriver>,
    shadow: Mutex<Shadow>,
    witness: std::sync::Arc<Mutex<Witness>>,
    shelf: Mutex<Vec<Block>>,
    /// The time until which each stream is busy.
    work: Mutex<BTreeMap<Stream, u64>>,
}

/// Runs a program to its end, and checks the final state.
pub(super) fn run(program: Program) {
    let world = Arc::new(World::new(program));
    let spawn = |number| {
        let world = Arc::clone(&world);
        thread::spawn(move || {
            for _ in 0..program.steps {
                world.step(number);
            }
        })
    };
    let threads: Vec<_> = (0..program.threads).map(spawn).collect();
    for thread in threads {
        thread.join().unwrap();
    }
    check(&world.allocator);
    world.end();
}

impl World {
    fn new(program: Program) -> World {
        let driver = SimDriver::new(SimConfig {
            capacity: Some(program.capacity),
            ..SimConfig::default()
        });
        let config: Config = program.config.parse().unwrap();
        let allocator = SharedAllocator::new(driver, 0, &config, std::sync::Arc::default(), None);
        let world = World {
            program,
            allocator,
            shadow: Mutex::default(),
            witness: std::sync::Arc::default(),
            shelf: Mutex::default(),
            work: Mutex::default(),
        };
        let limited = world
            .allocator
            .with_all(|device| device.set_limit(program.limit));
        limited.unwrap();
        if program.observes {
            world.observe();
        }
        world
    }

    fn observe(&self) {
        let witness = std::sync::Arc::clone(&self.witness);
        let observer = move |events: &[_]| {
            let mut witness = witness.lock().unwrap();
            events.iter().for_each(|event| witness.hear(event));
        };
        let observer: Observer = std::sync::Arc::new(observer);
        let observed = self.allocator.observe_events(Some(&observer));
        observed.unwrap();
    }

    /// Performs one random step in one thread.
    fn step(&self, number: u64) {
        match thread_rng().gen_range(0..100) {
            0..40 => self.allocate(self.any_stream()),
            40..62 => self.free(),
            62..72 => self.use_elsewhere(),
            74..82 if self.program.captures => self.capture(number),
            82..94 if self.program.captures => self.use_pool(number),
            72..76 => self.allocator.physical().driver_mut().advance(WORK_NS / 2),
            _ => self.manage(),
        }
    }

    fn any_stream(&self) -> Stream {
        Stream(thread_rng().gen_range(0..self.program.streams) * 0x70)
    }

    fn allocate(&self, stream: Stream) {
        let size = match thread_rng().gen_range(0..8) {
            0..5 => thread_rng().gen_range(1..MIB),
            5 | 6 => thread_rng().gen_range(MIB..10 * MIB),
            _ => thread_rng().gen_range(10 * MIB..30 * MIB),
        };
        if let Some(block) = self.try_allocate(Bytes(size), stream) {
            self.shelf.lock().unwrap().push(block);
        }
    }

    /// Returns a block, or `None` if memory has run out.
    fn try_allocate(&self, size: Bytes, stream: Stream) -> Option<Block> {
        let address = match self.allocator.allocate(size, stream, || Ok(false)) {
            Err(error) if error.is_out_of_memory() => return None,
            allocated => allocated.unwrap(),
        };
        let now_ns = self.allocator.physical().driver().now_ns();
        self.shadow.lock().unwrap().hold(address, size, now_ns);
        Some(Block {
            address,
            size,
            used_until_ns: 0,
        })
    }

    fn any_block(&self) -> Option<Block> {
        let mut shelf = self.shelf.lock().unwrap();
        let count = shelf.len();
        (count > 0).then(|| shelf.swap_remove(thread_rng().gen_range(0..count)))
    }

    fn free(&self) {
        if let Some(block) = self.any_block() {
            self.free_block(&block);
        }
    }

    fn free_block(&self, block: &Block) {
        let &Block { address, size, .. } = block;
        let mut shadow = self.shadow.lock().unwrap();
        shadow.free(address, size, block.used_until_ns);
        drop(shadow);
        self.allocator
            .with_block(address, |lane| lane.free(address))
            .unwrap();
    }

    /// Starts work that uses a block on another stream than its own.
    fn use_elsewhere(&self) {
        let Some(mut block) = self.any_block() else {
            return;
        };
        let (address, stream) = (block.address, self.any_stream());
        let own = self.allocator.with_block(address, |lane| {
            lane.record_stream(address, stream)?;
            lane.allocation(address)
        });
        let own = own.unwrap();
        assert_eq!((own.address, own.requested), (address, block.size));
        // During captures, graphs order the work.
        if own.stream != stream && !self.program.captures {
            block.used_until_ns = block.used_until_ns.max(self.launch(stream));
        }
        self.shelf.lock().unwrap().push(block);
    }

    /// Starts work on a stream and returns the time at which it is done.
    fn launch(&self, stream: Stream) -> u64 {
        let mut physical = self.allocator.physical();
        let driver = physical.driver_mut();
        driver.launch(stream, WORK_NS);
        let mut work = self.work.lock().unwrap();
        let until = work.entry(stream).or_default();
        *until = (*until).max(driver.now_ns()) + WORK_NS;
        *until
    }

    /// Makes a call that concerns the whole device.
    fn manage(&self) {
        let allocator = &self.allocator;
        match thread_rng().gen_range(0..9) {
            0 | 1 => allocator
                .with_all(|device| device.empty_cache(None))
                .unwrap()
                .unwrap(),
            2 => {
                let stats = allocator.with_all(|device| device.stats()).unwrap();
                assert!(stats.allocated() <= stats.reserved());
                let [active, allocated] = [stats.active_bytes.all, stats.allocated_bytes.all];
                assert!(allocated.current <= active.current);
                assert!(active.current <= active.peak && allocated.current <= allocated.peak);
                assert!(
                    self.program
                        .limit
                        .is_none_or(|limit| stats.reserved() <= limit)
                );
            }
            3 => {
                let segments = allocator
                    .with_all(|device| device.snapshot().segments)
                    .unwrap();
                let ends = segments
                    .iter()
                    .map(|segment| segment.address + segment.size);
                let starts = segments.iter().skip(1).map(|segment| segment.address);
                assert!(ends.zip(starts).all(|(end, start)| end <= start));
            }
            4 => {
                let rounds = ["caching", "caching:roundup_power2_divisions:4"];
                let config = rounds[thread_rng().gen_range(0..2)].parse().unwrap();
                // Every lane rejects options of another strategy.
                let is_caching = self.program.config.starts_with("caching");
                assert_eq!(
                    allocator
                        .for_each_lane(|lane| lane.reconfigure(&config))
                        .is_ok(),
                    is_caching
                );
            }
            5 => self.change_limit(),
            6 => allocator.for_each_lane(Lane::process_events).unwrap(),
            7 => allocator
                .with_all(|device| device.reset_stats(StatsReset::Peaks))
                .unwrap(),
            _ => check(&self.allocator),
        }
    }

    fn change_limit(&self) {
        let Some(limit) = self.program.limit else {
            return;
        };
        let factor = [1.0, 0.7][thread_rng().gen_range(0..2)];
        let limit = Some(limit.scale(factor));
        let changed = self.allocator.with_all(|device| device.set_limit(limit));
        changed.unwrap();
    }

    /// Acts like a capture into a graph: a private pool, routes, and no wait for events.
    fn capture(&self, number: u64) {
        self.allocator
            .for_each_lane(|lane| {
                lane.capture_begin();
                Ok(())
            })
            .unwrap();
        self.use_pool(number);
        self.step(number);
        self.allocator.for_each_lane(Lane::capture_end).unwrap();
    }

    /// Routes the requests of one stream to a private pool for a while.
    fn use_pool(&self, number: u64) {
        let (pool, stream) = (MempoolId(0, number + 1), self.any_stream());
        let allocator = &self.allocator;
        let begun = allocator.with_lane(LaneOf::Pools, |lane| {
            lane.begin_allocate_to_pool(pool, RouteOrder::BeforeOthers, move |asks| asks == stream)
        });
        begun.unwrap();
        if thread_rng().gen_bool(0.3) {
            let allowed = allocator.with_lane(LaneOf::Pools, |lane| {
                lane.set_pool(pool, PoolSetting::UseOnOom(true))
            });
            allowed.unwrap();
        }
        let size = Bytes(thread_rng().gen_range(1..4 * MIB));
        if let Some(block) = self.try_allocate(size, stream) {
            let address = block.address;
            let own = allocator.with_block(address, |lane| lane.allocation(address));
            // Another thread may have routed the stream before.
            assert_ne!(own.unwrap().pool, MempoolId::DEFAULT, "the route is seen");
            self.shelf.lock().unwrap().push(block);
        }
        self.free();
        let ended = allocator.with_lane(LaneOf::Pools, |lane| {
            lane.end_allocate_to_pool(pool)?;
            lane.release_pool(pool)
        });
        ended.unwrap();
        if thread_rng().gen_bool(0.3) {
            self.empty_pool(pool);
        }
    }

    fn empty_pool(&self, pool: MempoolId) {
        let emptied = self
            .allocator
            .with_all(|device| device.empty_cache(Some(pool)));
        match emptied.unwrap() {
            // The pool ended with its last block, when all cached memory was released.
            Ok(()) | Err(AllocError::NoSuchPool { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Checks the statistics when all threads are done, releases all memory, and checks that none is left.
    fn end(&self) {
        let allocator = &self.allocator;
        let blocks = std::mem::take(&mut *self.shelf.lock().unwrap());
        let sizes = blocks.iter().map(|&Block { address, .. }| {
            let block = allocator.with_block(address, |lane| lane.allocation(address));
            block.unwrap().size
        });
        let allocated: Bytes = sizes.sum();
        allocator.for_each_lane(Lane::process_events).unwrap();
        let stats = allocator.with_all(|device| device.stats()).unwrap();
        assert_eq!(stats.allocated(), allocated);
        assert_eq!(
            usize::try_from(stats.allocation.all.current),
            Ok(blocks.len())
        );
        let active = self.witness.lock().unwrap().active();
        if self.program.observes {
            assert_eq!(usize::try_from(stats.active.all.current), Ok(active));
        }
        let [physical, most] = {
            let memory = allocator.physical();
            [
                memory.driver().physical_bytes(),
                memory.driver().physical_bytes_max(),
            ]
        };
        assert!(stats.reserved() <= physical);
        if self.program.config != "direct" {
            // All other strategies reserve whole pages, and the device counts in pages.
            assert_eq!(stats.reserved(), physical);
        }
        assert!(self.program.limit.is_none_or(|limit| most <= limit));

        blocks.iter().for_each(|block| self.free_block(block));
        allocator
            .with_all(|device| device.empty_cache(None))
            .unwrap()
            .unwrap();
        let stats = allocator.with_all(|device| device.stats()).unwrap();
        assert_eq!([stats.allocated(), stats.reserved()], [Bytes::ZERO; 2]);
        assert_eq!(stats.active.all.current, 0);
        check(&self.allocator);
        let physical = allocator.physical();
        let [violations, leaks] = [
            physical.driver().violations().to_vec(),
            physical.driver().leaks(),
        ];
        assert_eq!([violations, leaks], [const { Vec::<String>::new() }; 2]);
    }
}
