//! Compares a device of several lanes with a single allocator, both driven by one thread. The same program must
//! give the same addresses, statistics, peaks, snapshots and errors, whatever streams it uses.
#![expect(clippy::unwrap_used, reason = "a test of one function, in parts")]

use std::sync::Arc;

use lowtide_core::{
    AllocError, Bytes, CheckLevel, Config, DeviceAddress, DeviceAllocator, Lane, Memory, MempoolId,
    PoolSetting, RouteOrder, StatsReset, Stream,
};
use lowtide_shared::{LaneOf, SharedAllocator};
use lowtide_sim::program::configs;
use lowtide_sim::{SimConfig, SimDriver};
use proptest::prelude::*;

/// Device memory: little, so that programs run out of it.
const CAPACITY: Bytes = Bytes::mib(160);

#[derive(Clone, Debug)]
enum Op {
    Allocate {
        size: Bytes,
        stream: Stream,
    },
    Free(usize),
    RecordStream(usize, Stream),
    /// Holds back a stream's events, or lets them pass.
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

/// The single allocator, and the lanes that must behave like it.
struct Both {
    single: DeviceAllocator<SimDriver>,
    shared: SharedAllocator<SimDriver>,
    held: Vec<DeviceAddress>,
    /// Whether all statistics are compared. One allocator releases memory in the order of stream numbers, and
    /// pending blocks become free in the order of their events. The count of free parts, and its peaks, depend on
    /// that order. In PyTorch it is a hash table's order.
    is_exact: bool,
}

impl Both {
    fn new(config: &Config) -> Both {
        Both {
            single: DeviceAllocator::new(driver(), 0, config),
            shared: SharedAllocator::new(driver(), 0, config, Arc::default(), None),
            held: Vec::new(),
            is_exact: true,
        }
    }

    fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        let (single, shared, held) = (&mut self.single, &self.shared, &mut self.held);
        match *op {
            Op::Allocate { size, stream } => {
                let expected = single.allocate(size, stream);
                prop_assert_eq!(&shared.allocate(size, stream, || Ok(false)), &expected);
                held.extend(expected);
            }
            Op::Free(index) if !held.is_empty() => {
                let address = held.swap_remove(index % held.len());
                let free = || shared.with_block(address, |lane| lane.free(address));
                prop_assert_eq!(free(), single.free(address));
                prop_assert_eq!(free(), Err(AllocError::NotAllocated { address }));
            }
            Op::RecordStream(index, stream) if !held.is_empty() => {
                let address = held[index % held.len()];
                let found = shared.with_block(address, |lane| lane.allocation(address));
                prop_assert_eq!(found, single.lane().allocation(address));
                self.is_exact = false;
                let recorded =
                    shared.with_block(address, |lane| lane.record_stream(address, stream));
                prop_assert_eq!(recorded, single.lane_mut().record_stream(address, stream));
            }
            Op::Free(_) | Op::RecordStream(..) => {}
            Op::Hold(stream, is_held) => {
                hold(single.driver(), stream, is_held);
                hold(shared.physical().driver_mut(), stream, is_held);
            }
            Op::EmptyCache => {
                let emptied = shared.with_all(|device| device.empty_cache(None));
                prop_assert_eq!(emptied, Ok(single.empty_cache(None)));
            }
            Op::ProcessEvents => {
                let processed = shared.for_each_lane(Lane::process_events);
                prop_assert_eq!(processed, single.lane_mut().process_events());
            }
            Op::Limit(limit) => {
                single.set_limit(limit);
                shared.with_all(|device| device.set_limit(limit)).unwrap();
            }
            Op::Capture(true) => {
                single.lane_mut().capture_begin();
                let begin = |lane: &mut Lane<_>| {
                    lane.capture_begin();
                    Ok(())
                };
                prop_assert_eq!(shared.for_each_lane(begin), Ok(()));
            }
            Op::Capture(false) => {
                let ended = shared.for_each_lane(Lane::capture_end);
                prop_assert_eq!(ended, single.lane_mut().capture_end());
            }
            Op::ResetPeaks => {
                single.reset_stats(StatsReset::Peaks);
                shared
                    .with_all(|device| device.reset_stats(StatsReset::Peaks))
                    .unwrap();
            }
            Op::ResetSums => {
                single.reset_stats(StatsReset::Accumulated);
                let reset = shared.with_all(|device| device.reset_stats(StatsReset::Accumulated));
                prop_assert_eq!(reset, Ok(()));
            }
            Op::BeginPool(..) | Op::EndPool(_) | Op::ReleasePool(_) | Op::UseOnOom(..) => {
                let change = |lane: &mut dyn Pools| lane.change(op);
                let expected = change(single.lane_mut());
                let changed = shared.with_lane(LaneOf::Pools, |pools| change(pools));
                prop_assert_eq!(changed, expected);
            }
        }
        Ok(())
    }

    fn compare(&mut self) -> Result<(), TestCaseError> {
        let (shared, single) = (
            self.shared.with_all(|device| device.stats().entries()),
            self.single.stats().entries(),
        );
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
        prop_assert_eq!(
            self.shared.with_all(|device| device.snapshot()).unwrap(),
            self.single.snapshot()
        );
        let checked = self.shared.for_each_lane(|lane| {
            lane.check_invariants(CheckLevel::Everything).unwrap();
            Ok(())
        });
        prop_assert_eq!(checked, Ok(()));
        let violations = self.shared.physical().driver().violations().to_vec();
        prop_assert_eq!(violations, Vec::<String>::new());
        Ok(())
    }
}

/// The pool operations of an allocator on any memory.
trait Pools {
    fn change(&mut self, op: &Op) -> Result<(), AllocError>;
}

impl<M: Memory> Pools for Lane<M> {
    fn change(&mut self, op: &Op) -> Result<(), AllocError> {
        match *op {
            Op::BeginPool(pool, routed) => {
                self.begin_allocate_to_pool(pool, RouteOrder::BeforeOthers, move |stream| {
                    stream == routed
                })
            }
            Op::EndPool(pool) => self.end_allocate_to_pool(pool),
            Op::ReleasePool(pool) => self.release_pool(pool),
            Op::UseOnOom(pool, allow) => self.set_pool(pool, PoolSetting::UseOnOom(allow)),
            _ => unreachable!("the other operations are of no pool"),
        }
    }
}

fn run(config: &Config, ops: &[Op]) -> Result<(), TestCaseError> {
    let mut both = Both::new(config);
    // Freeing a block waits for the device, so held events pass; `direct` polls them instead.
    let is_skipped = |op: &&Op| matches!((config, op), (Config::Direct(_), Op::Hold(..)));
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
        // A strategy that waits for memory waits in vain in a single thread.
        let waits = |config: &Config| config.retry_wait_ms().is_some();
        for config in configs().into_iter().filter(|config| !waits(config)) {
            let outcome = run(&config, &ops);
            outcome.map_err(|error| TestCaseError::fail(format!("{config}: {error}")))?;
        }
    }
}
