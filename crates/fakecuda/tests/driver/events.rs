use crate::support::*;

const NOT_READY: CUresult = CUresult::CUDA_ERROR_NOT_READY;
const INVALID_HANDLE: CUresult = CUresult::CUDA_ERROR_INVALID_HANDLE;

fn record(event: CUevent, stream: CUstream) {
    assert_eq!(unsafe { cuEventRecord(event, stream) }, OK);
}

fn query(event: CUevent) -> CUresult {
    unsafe { cuEventQuery(event) }
}

#[test]
fn an_event_is_a_point_in_its_stream() {
    let driver = Driver::start();
    let stream = non_blocking_stream();
    let address = allocate(PAGE).unwrap();
    let (early, late) = (event(), event());
    assert_eq!(query(early), OK);
    fill_in(stream, address, 1, 1);
    record(early, stream);
    assert_eq!(unsafe { cuEventSynchronize(early) }, OK);
    driver.hold(stream);
    fill_in(stream, address, 2, 1);
    record(late, stream);
    assert_eq!((query(early), query(late)), (OK, NOT_READY));
    // After another record, the event is the newer point.
    record(early, stream);
    assert_eq!(query(early), NOT_READY);
    driver.release(stream);
    assert_eq!(unsafe { cuEventSynchronize(early) }, OK);
    assert_eq!((query(early), query(late)), (OK, OK));
}

#[test]
fn a_stream_waits_for_the_event_as_it_was_recorded_then() {
    let driver = Driver::start();
    let (first, second) = (non_blocking_stream(), non_blocking_stream());
    let (from, to) = (allocate(PAGE).unwrap(), allocate(PAGE).unwrap());
    let point = event();
    driver.hold(first);
    fill_in(first, from, 1, 10);
    record(point, first);
    assert_eq!(unsafe { cuStreamWaitEvent(second, point, 0) }, OK);
    copy_in(second, to, from, 10);
    // Neither of these calls changes the wait.
    record(point, second);
    assert_eq!(unsafe { cuEventDestroy_v2(point) }, OK);
    assert_eq!(unsafe { cuStreamQuery(second) }, NOT_READY);
    driver.release(first);
    assert_eq!(synchronize(second), OK);
    assert_eq!(read(to, 10).unwrap(), [1; 10]);
}

#[test]
fn without_a_wait_the_other_stream_does_not() {
    let driver = Driver::start();
    let (first, second) = (non_blocking_stream(), non_blocking_stream());
    let (from, to) = (allocate(PAGE).unwrap(), allocate(PAGE).unwrap());
    driver.hold(first);
    fill_in(first, from, 1, 10);
    copy_in(second, to, from, 10);
    assert_eq!(synchronize(second), OK);
    driver.release(first);
    assert_eq!(synchronize(first), OK);
    assert_eq!(read(to, 10).unwrap(), [0; 10]);
}

#[test]
fn waiting_for_an_event_that_was_never_recorded_is_no_wait() {
    let _driver = Driver::start();
    let stream = non_blocking_stream();
    assert_eq!(unsafe { cuStreamWaitEvent(stream, event(), 0) }, OK);
    assert_eq!(unsafe { cuStreamQuery(stream) }, OK);
}

#[test]
fn events_belong_to_a_context_and_die_once() {
    let driver = Driver::start();
    let on_first = event();
    make_current(1);
    let stream_of_second = non_blocking_stream();
    assert_eq!(
        unsafe { cuEventRecord(on_first, stream_of_second) },
        INVALID_HANDLE
    );
    assert_eq!(driver.live().events, 1);
    assert_eq!(unsafe { cuEventDestroy_v2(on_first) }, OK);
    assert_eq!(unsafe { cuEventDestroy_v2(on_first) }, INVALID_HANDLE);
    assert_eq!(query(on_first), INVALID_HANDLE);
    assert_eq!(driver.live().events, 0);
    let interprocess_with_time = get(|out| unsafe { cuEventCreate(out, 4) });
    assert_eq!(
        interprocess_with_time,
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    );
}
