//! A device for unit tests: ascending addresses, a capacity, and calls that fail on demand.
//!
//! It has no contents, clock or virtual memory, and its streams are all idle or all busy. The simulator has
//! these, but cannot be used here because it depends on this crate.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::check::CheckLevel;
use crate::config::Config;
use crate::device::DeviceAllocator;
use crate::driver::{Driver, DriverError, EventHandle, Handle, MemoryInfo};
use crate::error::AllocError;
use crate::strategy::options::DirectConfig;
use crate::units::{Bytes, DeviceAddress, Stream};

/// Addresses and sizes are multiples of this, as with `cudaMalloc` for large sizes.
const GRANULARITY: Bytes = Bytes::mib(2);

/// A device. Its fields may be changed between calls.
#[derive(Debug)]
pub(crate) struct TestDriver {
    pub(crate) capacity: Bytes,
    /// The distance from one allocation to the next; if zero, they are adjacent.
    pub(crate) gap: Bytes,
    /// Whether an event passes only when it is waited for.
    pub(crate) busy: bool,
    /// The number of the event with which a capture of its stream begins.
    pub(crate) captured_from: u64,
    /// Whether it reports that it can map memory. The calls fail all the same.
    pub(crate) claims_virtual_memory: bool,
    /// The size of each allocation, by address.
    pub(crate) held: BTreeMap<DeviceAddress, Bytes>,
    /// Calls of [`Driver::allocate`] and [`Driver::free`] so far, failed ones included.
    pub(crate) calls: u64,
    /// The number of the call that fails, counted from zero, and its error.
    pub(crate) failure: Option<(u64, DriverError)>,
    next: DeviceAddress,
    pub(crate) events: u64,
    pub(crate) released_events: u64,
}

impl TestDriver {
    pub(crate) fn new(capacity: Bytes) -> TestDriver {
        TestDriver {
            capacity,
            gap: Bytes::ZERO,
            busy: false,
            captured_from: u64::MAX,
            claims_virtual_memory: false,
            held: BTreeMap::new(),
            calls: 0,
            failure: None,
            next: DeviceAddress(1 << 40),
            events: 0,
            released_events: 0,
        }
    }

    fn free_bytes(&self) -> Bytes {
        self.capacity - self.held.values().copied().sum()
    }

    fn fail_when_told_to(&mut self) -> Result<(), DriverError> {
        let call = self.calls;
        self.calls += 1;
        match &self.failure {
            Some((failing, error)) if *failing == call => Err(error.clone()),
            _ => Ok(()),
        }
    }
}

const fn unsupported<T>(call: &'static str) -> Result<T, DriverError> {
    Err(DriverError::Unsupported { call })
}

impl Driver for TestDriver {
    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        self.fail_when_told_to()?;
        let size = size.round_up(GRANULARITY);
        if size > self.free_bytes() {
            return Err(DriverError::OutOfMemory);
        }
        let address = self.next;
        self.next = address + size + self.gap;
        self.held.insert(address, size);
        Ok(address)
    }

    fn free(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        self.fail_when_told_to()?;
        let held = self.held.remove(&address);
        assert_eq!(held, Some(size.round_up(GRANULARITY)), "{address} is held");
        Ok(())
    }

    fn supports_virtual_memory(&self) -> bool {
        self.claims_virtual_memory
    }

    fn granularity(&self) -> Bytes {
        GRANULARITY
    }

    fn reserve(&mut self, _size: Bytes) -> Result<DeviceAddress, DriverError> {
        unsupported("reserve")
    }

    fn unreserve(&mut self, _address: DeviceAddress, _size: Bytes) -> Result<(), DriverError> {
        unsupported("unreserve")
    }

    fn create(&mut self, _size: Bytes) -> Result<Handle, DriverError> {
        Ok(Handle(1))
    }

    fn release(&mut self, _handle: Handle) -> Result<(), DriverError> {
        unsupported("release")
    }

    fn map(
        &mut self,
        _address: DeviceAddress,
        _size: Bytes,
        _handle: Handle,
    ) -> Result<(), DriverError> {
        unsupported("map")
    }

    fn set_access(&mut self, _address: DeviceAddress, _size: Bytes) -> Result<(), DriverError> {
        unsupported("set_access")
    }

    fn unmap(&mut self, _address: DeviceAddress, _size: Bytes) -> Result<(), DriverError> {
        unsupported("unmap")
    }

    fn record_event(&mut self, _stream: Stream) -> Result<EventHandle, DriverError> {
        self.events += 1;
        Ok(EventHandle(self.events))
    }

    fn query_event(&mut self, _event: EventHandle) -> Result<bool, DriverError> {
        Ok(!self.busy)
    }

    fn wait_event(&mut self, _stream: Stream, _event: EventHandle) -> Result<(), DriverError> {
        Ok(())
    }

    fn synchronize_event(&mut self, _event: EventHandle) -> Result<(), DriverError> {
        Ok(())
    }

    fn release_event(&mut self, _event: EventHandle) {
        self.released_events += 1;
    }

    fn capture_of(&mut self, _stream: Stream) -> Option<u64> {
        (self.events >= self.captured_from).then_some(1)
    }

    fn synchronize_stream(&mut self, _stream: Stream) -> Result<(), DriverError> {
        Ok(())
    }

    fn synchronize_device(&mut self) -> Result<(), DriverError> {
        Ok(())
    }

    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn memory_info(&mut self) -> Result<MemoryInfo, DriverError> {
        Ok(MemoryInfo {
            free: self.free_bytes(),
            total: self.capacity,
        })
    }
}

/// One step of a program.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    /// Requests memory in a stream.
    Allocate(Bytes, Stream),
    /// Frees one of the live blocks: the index is taken modulo their number.
    Free(usize),
    /// Uses one of the live blocks in another stream, so that it becomes pending when it is freed.
    Use(usize, Stream),
    /// Makes all streams idle or busy.
    Busy(bool),
    /// Makes the n-th driver call from here on fail, counted from zero.
    Fail(u64),
    EmptyCache,
}

/// Runs a program, in which requests may fail, and checks all invariants after each step. Then frees every block,
/// empties the cache and checks that all memory was released to the driver.
pub(crate) fn run(config: &Config, driver: TestDriver, program: &[Op]) {
    let mut allocator = DeviceAllocator::new(driver, 0, config);
    let mut live = Vec::new();
    for (step, &op) in program.iter().enumerate() {
        apply(&mut allocator, &mut live, op);
        let checked = allocator.lane().check_invariants(CheckLevel::Everything);
        checked.unwrap_or_else(|error| panic!("after step {step}, {op:?}: {error}"));
    }
    allocator.driver().failure = None;
    for address in live {
        allocator.free(address).unwrap();
    }
    allocator.empty_cache(None).unwrap();
    let checked = allocator.lane().check_invariants(CheckLevel::Everything);
    checked.unwrap_or_else(|error| panic!("at the end: {error}"));
    assert_eq!(allocator.driver().held, BTreeMap::new());
    assert_eq!(allocator.stats().reserved(), Bytes::ZERO);
}

fn apply(allocator: &mut DeviceAllocator<TestDriver>, live: &mut Vec<DeviceAddress>, op: Op) {
    match op {
        Op::Allocate(size, stream) => match allocator.allocate(size, stream) {
            Ok(address) => {
                let block = allocator.lane().allocation(address).unwrap();
                assert!(block.size >= size && block.stream == stream);
                live.push(address);
            }
            Err(error) => assert!(
                error.is_out_of_memory() || allocator.driver().failure.is_some(),
                "{error}"
            ),
        },
        Op::Free(index) if !live.is_empty() => {
            let index = index % live.len();
            // A strategy that calls the driver here may fail. The block is then still allocated.
            match allocator.free(live[index]) {
                Ok(()) => drop(live.swap_remove(index)),
                Err(error) => assert!(matches!(error, AllocError::Driver(_)), "{error}"),
            }
        }
        Op::Use(index, stream) if !live.is_empty() => {
            let address = live[index % live.len()];
            allocator.lane_mut().record_stream(address, stream).unwrap();
        }
        Op::Free(_) | Op::Use(..) => {}
        Op::Busy(busy) => allocator.driver().busy = busy,
        Op::Fail(calls) => {
            let error = DriverError::Failed {
                call: "told to fail",
                code: 1,
                message: String::new(),
            };
            let driver = allocator.driver();
            driver.failure = Some((driver.calls + calls, error));
        }
        Op::EmptyCache => match allocator.empty_cache(None) {
            Ok(()) => {}
            Err(error) => assert!(matches!(error, AllocError::Driver(_)), "{error}"),
        },
    }
}

/// Generates programs of up to `steps` steps in two streams, with sizes from `sizes`.
pub(crate) fn programs(
    sizes: impl proptest::strategy::Strategy<Value = u64>,
    steps: usize,
) -> impl proptest::strategy::Strategy<Value = Vec<Op>> {
    use proptest::prelude::*;
    let stream = || prop_oneof![4 => Just(Stream(0)), 1 => Just(Stream(1))];
    let op = prop_oneof![
        10 => (sizes, stream()).prop_map(|(size, stream)| Op::Allocate(Bytes(size), stream)),
        8 => any::<usize>().prop_map(Op::Free),
        1 => (any::<usize>(), stream()).prop_map(|(index, stream)| Op::Use(index, stream)),
        1 => any::<bool>().prop_map(Op::Busy),
        1 => (0..4_u64).prop_map(Op::Fail),
        1 => Just(Op::EmptyCache),
    ];
    prop::collection::vec(op, 1..steps)
}

mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn direct_and_caching_keep_their_promises(program in programs(1..1_u64 << 25, 200)) {
            run(&Config::Direct(DirectConfig), TestDriver::new(Bytes::mib(256)), &program);
            run(&Config::default(), TestDriver::new(Bytes::mib(256)), &program);
        }
    }
}
