//! The standard library's lock and clock, and real threads.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, mpsc};
use std::thread;

use lowtide_core::{AllocError, Bytes, CheckLevel, Config, Stream};
use lowtide_shared::{SharedAllocator, SharedError};
use lowtide_sim::{SimConfig, SimDriver};

fn allocator(config: &str, mib: u64) -> SharedAllocator<SimDriver> {
    let driver = SimDriver::new(SimConfig {
        capacity: Some(Bytes::mib(mib)),
        ..SimConfig::default()
    });
    let config: Config = config.parse().expect("a configuration");
    SharedAllocator::new(driver, 3, &config, Arc::default())
}

fn is_out_of_memory<T>(result: Result<T, SharedError>) -> bool {
    matches!(result, Err(SharedError::Alloc(error)) if error.is_out_of_memory())
}

#[test]
fn a_request_waits_for_another_thread_to_free() {
    let allocator = allocator("bfc:retry_ms:1000000000", 4);
    let first = allocator.allocate(Bytes::mib(3), Stream::DEFAULT).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| allocator.allocate(Bytes::mib(4), Stream::DEFAULT).unwrap());
        allocator.free(first).unwrap();
        assert_eq!(waiting.join().unwrap(), first);
    });
}

#[test]
fn a_wait_ends_and_then_the_failure_counts_once() {
    let allocator = allocator("bfc:retry_ms:20", 4);
    allocator.allocate(Bytes::mib(3), Stream::DEFAULT).unwrap();
    let result = allocator.allocate(Bytes::mib(4), Stream::DEFAULT);
    assert!(is_out_of_memory(result));
    assert_eq!(allocator.stats().unwrap().num_ooms, 1);
}

/// Who waits is passed by those that find memory.
#[test]
fn a_waiting_request_holds_up_no_other() {
    let allocator = allocator("bfc:retry_ms:1000000000", 4);
    let first = allocator.allocate(Bytes::mib(1), Stream::DEFAULT).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| allocator.allocate(Bytes::mib(4), Stream::DEFAULT).unwrap());
        for _ in 0..1000 {
            let address = allocator.allocate(Bytes::kib(4), Stream::DEFAULT).unwrap();
            allocator.free(address).unwrap();
        }
        allocator.free(first).unwrap();
        waiting.join().unwrap();
    });
}

#[test]
fn other_strategies_fail_at_once() {
    let allocator = allocator("caching", 4);
    let result = allocator.allocate(Bytes::mib(4), Stream::DEFAULT);
    assert!(is_out_of_memory(result), "a segment has 20 MiB");
}

#[test]
fn a_refused_call_says_why() {
    let allocator = allocator("bfc:retry_ms:20", 4);
    let address = lowtide_core::DeviceAddress(512);
    let error = SharedError::Alloc(AllocError::NotAllocated { address });
    assert_eq!(allocator.free(address), Err(error));
}

#[test]
fn after_a_panic_every_thread_is_told() {
    for config in ["bfc:retry_ms:20", "caching"] {
        after_a_panic(&allocator(config, 64));
    }
}

fn after_a_panic(allocator: &SharedAllocator<SimDriver>) {
    let address = allocator.allocate(Bytes(1), Stream::DEFAULT).unwrap();
    let panicking = AssertUnwindSafe(|| {
        let broken = || panic!("as a broken invariant would");
        allocator.with_block(address, |_| -> Result<(), AllocError> { broken() })
    });
    assert!(std::panic::catch_unwind(panicking).is_err());
    thread::scope(|scope| {
        let other = scope.spawn(|| allocator.allocate(Bytes(1), Stream::DEFAULT));
        assert_eq!(other.join().unwrap(), Err(SharedError::Poisoned));
    });
    assert_eq!(allocator.free(address), Err(SharedError::Poisoned));
    assert_eq!(allocator.with_all(|_| ()), Err(SharedError::Poisoned));
    let elsewhere = allocator.allocate(Bytes(1), Stream(7));
    assert_eq!(elsewhere, Err(SharedError::Poisoned), "on every stream");
}

/// Blocks are allocated by one thread and freed by another, with too little memory for all of them
/// at once.
#[test]
fn threads_hand_blocks_to_each_other() {
    let allocator = allocator("bfc:retry_ms:1000000000", 16);
    thread::scope(|scope| {
        for seed in 1..=2_u64 {
            let (sender, receiver) = mpsc::channel();
            let allocator = &allocator;
            scope.spawn(move || {
                for step in 0..2_000 {
                    let size = Bytes(step * seed * 7919 % (3 << 20) + 1);
                    let stream = Stream::DEFAULT;
                    sender
                        .send(allocator.allocate(size, stream).unwrap())
                        .unwrap();
                }
            });
            scope.spawn(move || {
                for address in receiver {
                    allocator.free(address).unwrap();
                }
            });
        }
    });
    assert_eq!(allocator.stats().unwrap().allocated(), Bytes::ZERO);
    let checked = allocator.check_invariants(CheckLevel::Everything);
    assert_eq!(checked, Ok(()));
}
