//! A device of several lanes against one allocator, driven by one thread: the same program has the same
//! addresses, figures, peaks, pictures and errors, whatever streams it uses.
#![expect(clippy::unwrap_used, reason = "a test of one function, in parts")]

use std::sync::Arc;

use lowtide_core::{
    AllocError, Bytes, CheckLevel, Config, DeviceAddress, DeviceAllocator, Driver, MempoolId,
    Stream,
};
use lowtide_shared::{SharedAllocator, SharedError};
use lowtide_sim::program::configs;
use lowtide_sim::{SimConfig, SimDriver};
use proptest::prelude::*;

/// Memory of the devices: little, so that programs run out of it.
const CAPACITY: Bytes = Bytes::mib(160);

#[derive(Clone, Debug)]
enum Op {
    Allocate {
        size: Bytes,
        stream: Stream,
    },
    Free(usize),
    RecordStream(usize, Stream),
    /// Keeps a stream from passing its events, or lets it.
    Hold(Stream, bool),
    EmptyCache,
    ProcessEvents,
    Limit(Option<Bytes>),
    BeginPool(MempoolId, Stream),
    EndPool(MempoolId),
    ReleasePool(MempoolId),
    UseOnOom(MempoolId, bool),
    Capture(bool),
    ResetPeaks,
    ResetSums,
}

fn op() -> impl Strategy<Value = Op> {
    let stream = || (0..5_u64).prop_map(|number| Stream(number * 0x70));
    let pool = || (1..3_u64).prop_map(|number| MempoolId(0, number));
    let size = prop_oneof![
        4 => (1..1_u64 << 20).prop_map(Bytes),
        4 => (1..1_u64 << 24).prop_map(Bytes),
        1 => (1..1_u64 << 26).prop_map(Bytes),
    ];
    prop_oneof![
        40 => (size, stream()).prop_map(|(size, stream)| Op::Allocate { size, stream }),
        30 => any::<usize>().prop_map(Op::Free),
        12 => (any::<usize>(), stream()).prop_map(|(index, stream)| Op::RecordStream(index, stream)),
        8 => (stream(), any::<bool>()).prop_map(|(stream, is_held)| Op::Hold(stream, is_held)),
        2 => Just(Op::EmptyCache),
        2 => Just(Op::ProcessEvents),
        1 => prop::option::of((10..160_u64).prop_map(Bytes::mib)).prop_map(Op::Limit),
        2 => (pool(), stream()).prop_map(|(pool, stream)| Op::BeginPool(pool, stream)),
        2 => pool().prop_map(Op::EndPool),
        2 => pool().prop_map(Op::ReleasePool),
        1 => (pool(), any::<bool>()).prop_map(|(pool, allow)| Op::UseOnOom(pool, allow)),
        2 => any::<bool>().prop_map(Op::Capture),
        1 => Just(Op::ResetPeaks),
        1 => Just(Op::ResetSums),
    ]
}

fn driver() -> SimDriver {
    SimDriver::new(SimConfig {
        capacity: Some(CAPACITY),
        ..SimConfig::default()
    })
}

fn hold(driver: &mut SimDriver, stream: Stream, is_held: bool) {
    if is_held {
        driver.hold_stream(stream);
    } else {
        driver.resume_stream(stream);
    }
}

/// The one allocator, and the lanes that must do as it does.
struct Both {
    single: DeviceAllocator<SimDriver>,
    shared: SharedAllocator<SimDriver>,
    held: Vec<DeviceAddress>,
    /// Whether all figures are the same. One allocator gives memory back in the order of the streams'
    /// numbers, and blocks that waited come free in the order of their events; what free parts came and
    /// went in that, and their peaks, depend on it. In PyTorch that is a hash table's order.
    is_exact: bool,
}

fn told<T>(result: Result<T, AllocError>) -> Result<T, SharedError> {
    result.map_err(SharedError::from)
}

impl Both {
    fn new(config: &Config) -> Both {
        Both {
            single: DeviceAllocator::new(driver(), 0, config),
            shared: SharedAllocator::new(driver(), 0, config, Arc::default()),
            held: Vec::new(),
            is_exact: true,
        }
    }

    fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        let Both {
            single,
            shared,
            held,
            is_exact,
        } = self;
        match *op {
            Op::Allocate { size, stream } => {
                let expected = told(single.allocate(size, stream));
                prop_assert_eq!(&shared.allocate(size, stream), &expected);
                held.extend(expected);
            }
            Op::Free(index) if !held.is_empty() => {
                let address = held.swap_remove(index % held.len());
                prop_assert_eq!(shared.free(address), told(single.free(address)));
                let again = Err(AllocError::NotAllocated { address }.into());
                prop_assert_eq!(shared.free(address), again);
            }
            Op::RecordStream(index, stream) if !held.is_empty() => {
                let address = held[index % held.len()];
                let found = shared.with_block(address, |lane| lane.allocation(address));
                prop_assert_eq!(found, told(single.allocation(address)));
                *is_exact = false;
                let recorded =
                    shared.with_block(address, |lane| lane.record_stream(address, stream));
                prop_assert_eq!(recorded, told(single.record_stream(address, stream)));
            }
            Op::Free(_) | Op::RecordStream(..) => {}
            Op::Hold(stream, is_held) => {
                hold(single.driver_mut(), stream, is_held);
                shared.with_driver(|driver| hold(driver, stream, is_held));
            }
            Op::EmptyCache => {
                prop_assert_eq!(shared.empty_cache(), told(single.empty_cache()));
            }
            Op::ProcessEvents => {
                prop_assert_eq!(shared.process_events(), told(single.process_events()));
            }
            Op::Limit(limit) => {
                single.set_limit(limit);
                shared.set_limit(limit).unwrap();
            }
            Op::Capture(true) => {
                single.capture_begin();
                shared.capture_begin().unwrap();
            }
            Op::Capture(false) => {
                prop_assert_eq!(shared.capture_end(), told(single.capture_end()));
            }
            Op::ResetPeaks => {
                single.reset_peak_stats();
                shared.reset_peak_stats().unwrap();
            }
            Op::ResetSums => {
                single.reset_accumulated_stats();
                shared.reset_accumulated_stats().unwrap();
            }
            Op::BeginPool(..) | Op::EndPool(_) | Op::ReleasePool(_) | Op::UseOnOom(..) => {
                let change = |lane: &mut dyn Pools| lane.change(op);
                let expected = told(change(single));
                let changed = shared.with_pools(|pools| change(pools)).unwrap();
                prop_assert_eq!(told(changed), expected);
            }
        }
        Ok(())
    }

    fn compare(&mut self) -> Result<(), TestCaseError> {
        let (shared, single) = (self.shared.memory_stats(), self.single.memory_stats());
        let shared = shared.unwrap();
        let is_exact = |key: &str| {
            self.is_exact || !key.starts_with("inactive_split") || key.ends_with(".current")
        };
        let figures = shared
            .iter()
            .zip(&single)
            .filter(|((key, _), _)| is_exact(key));
        let different: Vec<_> = figures
            .filter(|(shared, single)| shared != single)
            .collect();
        prop_assert!(different.is_empty(), "{different:?}");
        prop_assert_eq!(shared.len(), single.len());
        Ok(())
    }

    fn compare_everything(&mut self) -> Result<(), TestCaseError> {
        self.compare()?;
        prop_assert_eq!(self.shared.snapshot().unwrap(), self.single.snapshot());
        let checked = self.shared.check_invariants(CheckLevel::Everything);
        prop_assert_eq!(checked, Ok(()));
        let violations = self
            .shared
            .with_driver(|driver| driver.violations().to_vec());
        prop_assert_eq!(violations, Vec::<String>::new());
        Ok(())
    }
}

/// What pools are asked for, of an allocator on any driver.
trait Pools {
    fn change(&mut self, op: &Op) -> Result<(), AllocError>;
}

impl<D: Driver> Pools for DeviceAllocator<D> {
    fn change(&mut self, op: &Op) -> Result<(), AllocError> {
        match *op {
            Op::BeginPool(pool, routed) => {
                self.begin_allocate_to_pool(pool, move |stream| stream == routed)
            }
            Op::EndPool(pool) => self.end_allocate_to_pool(pool),
            Op::ReleasePool(pool) => self.release_pool(pool),
            Op::UseOnOom(pool, allow) => self.set_use_on_oom(pool, allow),
            _ => unreachable!("the other operations are of no pool"),
        }
    }
}

fn run(config: &Config, ops: &[Op]) -> Result<(), TestCaseError> {
    let mut both = Both::new(config);
    // Giving a block back waits for the device, so that held events pass, where `direct` has them polled.
    let is_skipped = |op: &&Op| matches!((config, op), (Config::Direct, Op::Hold(..)));
    for op in ops.iter().filter(|op| !is_skipped(op)) {
        both.apply(op)?;
        both.compare()?;
    }
    both.compare_everything()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn lanes_do_what_one_allocator_does(
        ops in prop::collection::vec(op(), 1..160),
        shares_blocks in any::<bool>(),
    ) {
        let is_run = |op: &Op| shares_blocks || !matches!(op, Op::RecordStream(..));
        let ops: Vec<Op> = ops.into_iter().filter(is_run).collect();
        // One that waits for memory does so in vain in a single thread.
        let waits = |config: &Config| DeviceAllocator::new(driver(), 0, config).retry_wait_ms().is_some();
        for config in configs().into_iter().filter(|config| !waits(config)) {
            let outcome = run(&config, &ops);
            outcome.map_err(|error| TestCaseError::fail(format!("{config}: {error}")))?;
        }
    }
}
