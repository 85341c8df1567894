use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;

use crate::support::*;

const NOT_READY: CUresult = CUresult::CUDA_ERROR_NOT_READY;

/// Calls `work` on another thread, runs `meanwhile`, and returns the result of `work`. Fails if `work` did not wait
/// for `meanwhile`.
fn waits_for<T: Send>(work: impl FnOnce() -> T + Send, meanwhile: impl FnOnce()) -> T {
    let (send, done) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || send.send(work()).unwrap());
        // Long enough for work that does not wait. Work that waits is given all the time it needs.
        let early = done.recv_timeout(std::time::Duration::from_millis(50));
        assert!(early.is_err(), "did not wait");
        meanwhile();
        done.recv().unwrap()
    })
}

fn make_current_here() {
    make_current(0);
}

#[test]
fn words_are_filled_as_bytes_are() {
    let _driver = Driver::start();
    let stream = non_blocking_stream();
    let address = allocate(PAGE).unwrap();
    let fill = |address, count| unsafe { cuMemsetD32Async(address, 0x0403_0201, count, stream) };
    fill_in(stream, address, 9, 16);
    assert_eq!(fill(address + 4, 2), OK);
    assert_eq!(fill(address, 0), OK);
    assert_eq!(synchronize(stream), OK);
    let expected = [9, 9, 9, 9, 1, 2, 3, 4, 1, 2, 3, 4, 9, 9, 9, 9];
    assert_eq!(read(address, 16).unwrap(), expected);
    assert_eq!(
        unsafe { cuStreamWriteValue32_v2(stream, address, 0x0807_0605, 0) },
        OK
    );
    assert_eq!(synchronize(stream), OK);
    assert_eq!(read(address, 6).unwrap(), [5, 6, 7, 8, 1, 2]);
    for (address, count) in [(address + 2, 1), (address, usize::MAX)] {
        assert_eq!(fill(address, count), CUresult::CUDA_ERROR_INVALID_VALUE);
    }
}

#[test]
fn work_of_a_stream_is_done_in_order_and_later() {
    let driver = Driver::start();
    let stream = non_blocking_stream();
    let address = allocate(PAGE).unwrap();
    driver.hold(stream);
    fill_in(stream, address, 1, 100);
    fill_in(stream, address, 2, 50);
    copy_in(stream, address + 1000, address, 100);
    fill_in(stream, address, 3, 100);
    assert_eq!(unsafe { cuStreamQuery(stream) }, NOT_READY);
    assert_eq!(unsafe { *(address as *const u8) }, 0);
    driver.release(stream);
    assert_eq!(synchronize(stream), OK);
    assert_eq!(unsafe { cuStreamQuery(stream) }, OK);
    let seen = read(address, 1100).unwrap();
    assert_eq!(&seen[..100], [3; 100]);
    assert_eq!(&seen[1000..1050], [2; 50]);
    assert_eq!(&seen[1050..], [1; 50]);
}

#[test]
fn a_lazy_stream_works_once_it_is_waited_for_or_asked() {
    let driver = Driver::start();
    let (first, second) = (non_blocking_stream(), non_blocking_stream());
    let address = allocate(PAGE).unwrap();
    driver.set_lazy(true);
    fill_in(first, address, 1, 1);
    fill_in(second, address, 2, 1);
    assert_eq!(synchronize(second), OK);
    // So no work of the first stream ran before.
    assert_eq!(unsafe { *(address as *const u8) }, 2);
    assert_eq!(synchronize(first), OK);
    assert_eq!(unsafe { *(address as *const u8) }, 1);
    fill_in(first, address, 3, 1);
    while unsafe { cuStreamQuery(first) } != OK {}
    fill_in(first, address, 4, 1);
    // Work that a stream waits for runs first.
    let event: CUevent = get(|event| unsafe { cuEventCreate(event, 0) }).unwrap();
    assert_eq!(unsafe { cuEventRecord(event, first) }, OK);
    assert_eq!(unsafe { cuStreamWaitEvent(second, event, 0) }, OK);
    fill_in(second, address, 5, 1);
    assert_eq!(synchronize(second), OK);
    assert_eq!(unsafe { *(address as *const u8) }, 5);
    fill_in(first, address, 6, 1);
    driver.set_lazy(false);
    assert_eq!(synchronize(first), OK);
    assert_eq!(unsafe { *(address as *const u8) }, 6);
}

#[test]
fn a_lazy_stream_misses_pinned_memory_that_is_gone() {
    let driver = Driver::start();
    let stream = non_blocking_stream();
    let address = allocate(PAGE).unwrap();
    let mut host = vec![0_u8; 2 * 4096];
    let host = host.as_mut_ptr();
    driver.set_lazy(true);
    assert_eq!(unsafe { cuMemHostRegister_v2(host.cast(), 4096, 0) }, OK);
    let copied = unsafe { cuMemcpyDtoHAsync_v2(host.cast(), address, 100, stream) };
    assert_eq!(copied, OK);
    assert_eq!(unsafe { cuMemHostUnregister(host.cast()) }, OK);
    assert_eq!(synchronize(stream), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
}

#[test]
fn memory_reused_too_early_is_overwritten() {
    let driver = Driver::start();
    let (writer, reader) = (non_blocking_stream(), non_blocking_stream());
    let (shared, result) = (allocate(PAGE).unwrap(), allocate(PAGE).unwrap());
    fill_in(writer, shared, 1, 100);
    assert_eq!(synchronize(writer), OK);
    driver.hold(reader);
    copy_in(reader, result, shared, 100);
    // The reader's work is still to come, and nothing waited for it.
    fill_in(writer, shared, 2, 100);
    assert_eq!(synchronize(writer), OK);
    driver.release(reader);
    assert_eq!(synchronize(reader), OK);
    assert_eq!(read(result, 100).unwrap(), [2; 100]);
}

#[test]
fn freeing_waits_for_the_device_and_unmapping_does_not() {
    use crate::virtual_memory::{allow, create, map, reserve};
    let driver = Driver::start();
    let stream = non_blocking_stream();
    let (busy, idle) = (allocate(PAGE).unwrap(), allocate(PAGE).unwrap());
    driver.hold(stream);
    fill_in(stream, busy, 1, PAGE);
    let free_idle = || {
        make_current_here();
        free(idle)
    };
    assert_eq!(waits_for(free_idle, || driver.release(stream)), OK);
    assert!(can_be_read(busy) && !can_be_read(idle));

    let (range, handle) = (reserve(PAGE), create(PAGE).unwrap());
    assert_eq!(map(range, PAGE, handle), OK);
    assert_eq!(allow(range, PAGE, 0), OK);
    driver.hold(stream);
    fill_in(stream, range, 1, PAGE);
    assert_eq!(unsafe { cuMemUnmap(range, PAGE) }, OK);
    driver.release(stream);
    // The work found no mapping there, so the context is unusable, as on a card.
    assert_eq!(synchronize(stream), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_eq!(allocate(PAGE), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
}

#[test]
fn waiting_ends_when_the_stream_is_released() {
    let driver = Driver::start();
    let stream = non_blocking_stream();
    let address = allocate(PAGE).unwrap();
    driver.hold(stream);
    fill_in(stream, address, 1, 1);
    let handle = stream as usize;
    let wait = || synchronize(handle as CUstream);
    assert_eq!(waits_for(wait, || driver.release(stream)), OK);
    driver.hold(stream);
    fill_in(stream, address, 2, 1);
    let wait = || {
        make_current_here();
        unsafe { cuCtxSynchronize() }
    };
    assert_eq!(waits_for(wait, || driver.release(stream)), OK);
}

#[test]
fn the_legacy_stream_and_blocking_streams_wait_for_each_other() {
    let driver = Driver::start();
    let blocking = get(|out| unsafe { cuStreamCreate(out, 0) }).unwrap();
    let free_running = non_blocking_stream();
    let address = allocate(PAGE).unwrap();
    driver.hold(blocking);
    fill_in(blocking, address, 1, 100);
    fill_in(null_mut(), address, 2, 50);
    assert_eq!(unsafe { cuStreamQuery(null_mut()) }, NOT_READY);
    fill_in(free_running, address + 1000, 3, 100);
    assert_eq!(synchronize(free_running), OK);
    assert_eq!(unsafe { *(address as *const u8) }, 0);
    driver.release(blocking);
    assert_eq!(synchronize(null_mut()), OK);
    assert_eq!(read(address, 100).unwrap(), [[2; 50], [1; 50]].concat());

    driver.hold(null_mut());
    fill_in(null_mut(), address, 4, 100);
    fill_in(blocking, address, 5, 50);
    assert_eq!(unsafe { cuStreamQuery(blocking) }, NOT_READY);
    driver.release(null_mut());
    assert_eq!(synchronize(blocking), OK);
    assert_eq!(read(address, 100).unwrap(), [[5; 50], [4; 50]].concat());
}

#[test]
fn host_functions_run_in_order_and_may_not_call_back() {
    static CODE: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" fn call_back(address: *mut c_void) {
        let content = unsafe { address.cast::<u8>().read() };
        assert_eq!(content, 7);
        let code = free(address as CUdeviceptr);
        CODE.store(code as u32, Ordering::SeqCst);
    }
    let _driver = Driver::start();
    let stream = non_blocking_stream();
    let address = allocate(PAGE).unwrap();
    fill_in(stream, address, 7, 1);
    let argument = address as *mut c_void;
    assert_eq!(
        unsafe { cuLaunchHostFunc(stream, Some(call_back), argument) },
        OK
    );
    fill_in(stream, address, 8, 1);
    assert_eq!(synchronize(stream), OK);
    assert_eq!(
        CODE.load(Ordering::SeqCst),
        CUresult::CUDA_ERROR_NOT_PERMITTED as u32
    );
    assert_eq!(read(address, 1).unwrap(), [8]);
}

#[test]
fn a_destroyed_stream_ends_its_work() {
    let driver = Driver::start();
    let stream = non_blocking_stream();
    let address = allocate(PAGE).unwrap();
    driver.hold(stream);
    fill_in(stream, address, 1, 1);
    let marker = event();
    assert_eq!(unsafe { cuEventRecord(marker, stream) }, OK);
    assert_eq!(unsafe { cuStreamDestroy_v2(stream) }, OK);
    assert_eq!(
        unsafe { cuEventQuery(marker) },
        CUresult::CUDA_ERROR_NOT_READY
    );
    driver.release(stream);
    assert_eq!(unsafe { cuEventSynchronize(marker) }, OK);
    assert_eq!(read(address, 1).unwrap(), [1]);
}

#[test]
fn pageable_memory_is_read_when_the_copy_is_asked_for() {
    let driver = Driver::start();
    let stream = non_blocking_stream();
    let address = allocate(PAGE).unwrap();
    let pinned = get(|out| unsafe { cuMemHostAlloc(out, 10, 0) }).unwrap();
    let mut pageable = [1_u8; 10];
    unsafe { pinned.cast::<[u8; 10]>().write([1; 10]) };
    driver.hold(stream);
    let pageable_address = pageable.as_ptr().cast::<c_void>();
    let copies = [
        (address, pageable_address),
        (address + 10, pinned.cast_const()),
    ];
    for (to, from) in copies {
        assert_eq!(unsafe { cuMemcpyHtoDAsync_v2(to, from, 10, stream) }, OK);
    }
    pageable.fill(2);
    unsafe { pinned.cast::<[u8; 10]>().write([2; 10]) };
    driver.release(stream);
    assert_eq!(synchronize(stream), OK);
    assert_eq!(read(address, 20).unwrap(), [[1; 10], [2; 10]].concat());
    // In the other direction, the call returns only after the copy.
    let to = pageable.as_mut_ptr().cast::<c_void>();
    assert_eq!(unsafe { cuMemcpyDtoHAsync_v2(to, address, 10, stream) }, OK);
    assert_eq!(pageable, [1; 10]);
    assert_eq!(unsafe { cuMemFreeHost(pinned) }, OK);
}

#[test]
fn memory_freed_in_a_stream_is_there_until_then() {
    let driver = Driver::start();
    let stream = non_blocking_stream();
    let address = get(|out| unsafe { cuMemAllocAsync(out, PAGE, stream) }).unwrap();
    driver.hold(stream);
    fill_in(stream, address, 1, PAGE);
    assert_eq!(unsafe { cuMemFreeAsync(address, stream) }, OK);
    assert_eq!(driver.used_bytes(0), PAGE);
    assert!(can_be_read(address));
    driver.release(stream);
    assert_eq!(synchronize(stream), OK);
    assert_eq!(driver.used_bytes(0), 0);
    assert!(!can_be_read(address));
}

#[test]
fn copies_reach_the_other_device_and_fills_need_peer_access() {
    let _driver = Driver::start();
    let first = make_current(0);
    let on_first = allocate(PAGE).unwrap();
    make_current(1);
    let on_second = allocate(PAGE).unwrap();
    let stream = non_blocking_stream();
    fill_in(stream, on_second, 1, 10);
    copy_in(stream, on_first, on_second, 10);
    assert_eq!(synchronize(stream), OK);
    assert_eq!(read(on_first, 10).unwrap(), [1; 10]);
    assert_eq!(unsafe { cuCtxEnablePeerAccess(first, 0) }, OK);
    assert_eq!(
        unsafe { cuCtxEnablePeerAccess(first, 0) },
        CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
    );
    fill_in(stream, on_first, 2, 5);
    assert_eq!(synchronize(stream), OK);
    assert_eq!(read(on_first, 10).unwrap(), [[2; 5], [1; 5]].concat());
    assert_eq!(unsafe { cuCtxSetCurrent(first) }, OK);
    let stream = non_blocking_stream();
    fill_in(stream, on_second, 3, 1);
    assert_eq!(synchronize(stream), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
}

#[test]
fn work_on_memory_that_is_gone_is_an_error_and_no_crash() {
    let driver = Driver::start();
    let (stream, other) = (non_blocking_stream(), non_blocking_stream());
    let address = get(|out| unsafe { cuMemAllocAsync(out, PAGE, stream) }).unwrap();
    driver.hold(stream);
    fill_in(stream, address, 1, PAGE);
    assert_eq!(unsafe { cuMemFreeAsync(address, other) }, OK);
    assert_eq!(synchronize(other), OK);
    driver.release(stream);
    assert_eq!(synchronize(stream), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
}

#[test]
fn each_thread_has_a_default_stream_of_its_own() {
    let driver = Driver::start();
    let per_thread = 2 as CUstream;
    let address = allocate(PAGE).unwrap();
    driver.hold(per_thread);
    fill_in(per_thread, address, 1, 10);
    thread::scope(|scope| {
        scope.spawn(|| {
            make_current_here();
            fill_in(2 as CUstream, address, 2, 5);
            assert_eq!(synchronize(2 as CUstream), OK);
        });
    });
    driver.release(per_thread);
    assert_eq!(synchronize(per_thread), OK);
    assert_eq!(read(address, 10).unwrap(), [1; 10]);
    assert_eq!(driver.live().streams, 0);
}

#[test]
fn many_threads_keep_their_memory_apart() {
    let driver = Driver::start();
    thread::scope(|scope| {
        for number in 1..=8_u8 {
            scope.spawn(move || {
                make_current_here();
                let stream = non_blocking_stream();
                for round in 0..40 {
                    let bytes = 1000 * (1 + (round + usize::from(number)) % 5);
                    let address = allocate(bytes).unwrap();
                    let copy = get(|out| unsafe { cuMemAllocAsync(out, bytes, stream) }).unwrap();
                    fill_in(stream, address, number, bytes);
                    copy_in(stream, copy, address, bytes);
                    let done = event();
                    assert_eq!(unsafe { cuEventRecord(done, stream) }, OK);
                    assert_eq!(unsafe { cuEventSynchronize(done) }, OK);
                    assert_eq!(unsafe { cuEventDestroy_v2(done) }, OK);
                    assert!(
                        read(copy, bytes)
                            .unwrap()
                            .iter()
                            .all(|&byte| byte == number)
                    );
                    assert_eq!(unsafe { cuMemFreeAsync(copy, stream) }, OK);
                    assert_eq!(free(address), OK);
                }
                assert_eq!(synchronize(stream), OK);
                assert_eq!(unsafe { cuStreamDestroy_v2(stream) }, OK);
            });
        }
    });
    assert_eq!(driver.used_bytes(0), 0);
    let expected = Live {
        contexts: 1,
        ..Live::default()
    };
    assert_eq!(driver.live(), expected);
}
