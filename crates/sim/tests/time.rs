//! Logical time: which calls wait for which work, and the costs of calls.

use lowtide_core::{Bytes, Driver, DriverError, Stream};
use lowtide_sim::{Call, FaultPlan, SimDriver};

const PAGE: Bytes = Bytes::mib(2);
const KERNEL_NS: u64 = 400_000_000;
const A: Stream = Stream(1);
const B: Stream = Stream(2);

#[test]
fn an_event_passes_when_the_work_before_it_is_done() {
    let mut driver = SimDriver::default();
    let idle = driver.record_event(A).unwrap();
    assert_eq!(driver.query_event(idle), Ok(true));

    driver.launch(A, KERNEL_NS);
    let first = driver.record_event(A).unwrap();
    driver.launch(A, KERNEL_NS);
    let second = driver.record_event(A).unwrap();
    let other = driver.record_event(B).unwrap();
    assert_eq!(driver.query_event(first), Ok(false));
    assert_eq!(
        driver.query_event(other),
        Ok(true),
        "streams do not wait for each other"
    );

    driver.advance(KERNEL_NS);
    assert_eq!(driver.query_event(first), Ok(true));
    assert_eq!(driver.query_event(second), Ok(false));
    driver.synchronize_event(second).unwrap();
    assert!(driver.now_ns() >= 2 * KERNEL_NS);
    assert_eq!(driver.query_event(second), Ok(true));
}

#[test]
fn work_starts_when_it_is_queued_on_an_idle_stream() {
    let mut driver = SimDriver::default();
    driver.advance(KERNEL_NS);
    driver.launch(A, KERNEL_NS);
    driver.synchronize_stream(A).unwrap();
    assert!(driver.now_ns() >= 2 * KERNEL_NS);
}

#[test]
fn only_cuda_free_and_synchronize_wait() {
    let mut driver = SimDriver::default();
    let memory = driver.allocate(PAGE).unwrap();
    driver.launch(A, KERNEL_NS);
    driver.launch(B, 2 * KERNEL_NS);

    let range = driver.reserve(PAGE).unwrap();
    let handle = driver.create(PAGE).unwrap();
    driver.map(range, PAGE, handle).unwrap();
    driver.set_access(range, PAGE).unwrap();
    driver.unmap(range, PAGE).unwrap();
    driver.release(handle).unwrap();
    driver.unreserve(range, PAGE).unwrap();
    assert!(driver.now_ns() < KERNEL_NS);
    assert!(
        Call::ALL
            .iter()
            .all(|&call| driver.stats(call).wait_ns == 0)
    );

    driver.synchronize_stream(A).unwrap();
    assert!((KERNEL_NS..2 * KERNEL_NS).contains(&driver.now_ns()));
    driver.free(memory, PAGE).unwrap();
    assert!(driver.now_ns() >= 2 * KERNEL_NS);
    assert!(driver.stats(Call::Free).wait_ns > KERNEL_NS / 2);
}

#[test]
fn a_free_that_fails_does_not_wait() {
    let mut driver = SimDriver::default();
    driver.launch(A, KERNEL_NS);
    let address = driver.allocate(PAGE).unwrap();
    driver.set_faults(FaultPlan::nth(Call::Free, 1, DriverError::OutOfMemory));
    assert!(driver.free(address, PAGE).is_err());
    assert!(driver.now_ns() < KERNEL_NS);
}

#[test]
fn a_held_event_passes_when_it_is_completed() {
    let mut driver = SimDriver::default();
    let before = driver.record_event(A).unwrap();
    driver.hold_stream(A);
    let [first, second] = [(); 2].map(|()| {
        let event = driver.next_event();
        assert_eq!(driver.record_event(A), Ok(event));
        event
    });
    let other = driver.record_event(B).unwrap();
    driver.advance(KERNEL_NS);
    assert_eq!(driver.query_event(before), Ok(true));
    assert_eq!(driver.query_event(other), Ok(true));
    assert_eq!(driver.query_event(first), Ok(false));

    assert!(driver.complete_event(second));
    assert_eq!(driver.query_event(second), Ok(true));
    assert_eq!(driver.query_event(first), Ok(false));
    driver.resume_stream(A);
    assert_eq!(driver.query_event(first), Ok(true));
    assert!(
        !driver.complete_event(driver.next_event()),
        "not recorded yet"
    );
}

#[test]
fn waiting_passes_held_events() {
    type Wait = fn(&mut SimDriver, lowtide_core::EventHandle);
    let waits: [Wait; 3] = [
        |driver, event| driver.synchronize_event(event).unwrap(),
        |driver, _| driver.synchronize_stream(A).unwrap(),
        |driver, _| {
            let address = driver.allocate(PAGE).unwrap();
            driver.free(address, PAGE).unwrap();
        },
    ];
    for wait in waits {
        let mut driver = SimDriver::default();
        driver.hold_stream(A);
        driver.launch(A, KERNEL_NS);
        let event = driver.record_event(A).unwrap();
        assert_eq!(driver.query_event(event), Ok(false));
        wait(&mut driver, event);
        assert_eq!(driver.query_event(event), Ok(true));
        assert!(driver.now_ns() >= KERNEL_NS);
    }
}

#[test]
fn an_event_can_be_made_to_pass_early() {
    let mut driver = SimDriver::default();
    driver.launch(A, KERNEL_NS);
    let event = driver.record_event(A).unwrap();
    assert!(driver.complete_event(event));
    assert_eq!(driver.query_event(event), Ok(true));
    assert!(driver.now_ns() < KERNEL_NS);
}

#[test]
fn work_waits_for_an_event_of_another_stream() {
    let mut driver = SimDriver::default();
    driver.launch(A, KERNEL_NS);
    let event = driver.record_event(A).unwrap();
    driver.launch(A, KERNEL_NS);
    driver.wait_event(B, event).unwrap();
    assert!(driver.now_ns() < KERNEL_NS, "the host does not wait");
    let waited = driver.record_event(B).unwrap();
    assert_eq!(driver.query_event(waited), Ok(false));
    driver.synchronize_event(event).unwrap();
    assert_eq!(driver.query_event(waited), Ok(true));
    assert!(
        driver.now_ns() < 2 * KERNEL_NS,
        "not for what came behind it"
    );

    driver.hold_stream(A);
    let held = driver.record_event(A).unwrap();
    driver.wait_event(B, held).unwrap();
    let waits = driver.record_event(B).unwrap();
    driver.advance(2 * KERNEL_NS);
    assert_eq!(driver.query_event(waits), Ok(false));
    driver.resume_stream(B);
    assert_eq!(driver.query_event(waits), Ok(true));
    driver.release_event(event);
    assert!(driver.wait_event(B, event).is_err(), "it is gone");
}

#[test]
fn every_call_moves_the_clock_by_its_cost() {
    let mut driver = SimDriver::default();
    let memory = driver.allocate(Bytes::mib(20)).unwrap();
    assert_eq!(driver.now_ns(), 31_800);
    driver.free(memory, Bytes::mib(20)).unwrap();
    let range = driver.reserve(Bytes::gib(1)).unwrap();
    let handle = driver.create(Bytes::mib(20)).unwrap();
    driver.map(range, Bytes::mib(20), handle).unwrap();
    driver.set_access(range, Bytes::mib(20)).unwrap();
    driver.unmap(range, Bytes::mib(20)).unwrap();
    driver.release(handle).unwrap();
    driver.unreserve(range, Bytes::gib(1)).unwrap();
    let event = driver.record_event(A).unwrap();
    driver.query_event(event).unwrap();
    driver.synchronize_event(event).unwrap();
    driver.wait_event(A, event).unwrap();
    driver.release_event(event);
    driver.synchronize_stream(A).unwrap();
    driver.synchronize_device().unwrap();
    driver.memory_info().unwrap();
    for call in Call::ALL {
        assert!(driver.stats(call).cost_ns > 0, "{call}");
        assert_eq!(driver.stats(call).count, 1, "{call}");
    }
    assert_eq!(driver.driver_time_ns(), driver.now_ns());
}

#[test]
fn mapping_piece_by_piece_costs_by_the_piece() {
    let mut driver = SimDriver::default();
    let range = driver.reserve(Bytes::mib(40)).unwrap();
    for offset in [0, 20] {
        let handle = driver.create(Bytes::mib(20)).unwrap();
        driver
            .map(range + Bytes::mib(offset), Bytes::mib(20), handle)
            .unwrap();
        driver.release(handle).unwrap();
    }
    driver.set_access(range, Bytes::mib(40)).unwrap();
    assert_eq!(driver.stats(Call::SetAccess).cost_ns, 2 * 18_100);
    // The cost of the last unmap includes the release of the memory.
    driver.unmap(range, Bytes::mib(40)).unwrap();
    assert_eq!(driver.stats(Call::Unmap).cost_ns, 2 * (12_800 + 12_200));
}

#[test]
fn memory_that_shares_a_page_is_cheap() {
    let mut driver = SimDriver::default();
    let first = driver.allocate(Bytes(512)).unwrap();
    assert_eq!(driver.now_ns(), 26_500);
    let second = driver.allocate(Bytes(512)).unwrap();
    driver.free(first, Bytes(512)).unwrap();
    assert_eq!(driver.now_ns(), 26_500 + 2 * 900);
    driver.free(second, Bytes(512)).unwrap();
    assert_eq!(driver.now_ns(), 26_500 + 2 * 900 + 23_500);
}
