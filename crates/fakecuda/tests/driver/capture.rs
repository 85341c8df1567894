use std::ptr::{null, null_mut};

use crate::support::*;
use crate::virtual_memory::{allow, create, map, reserve};

type Mode = CUstreamCaptureMode;
const GLOBAL: Mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const THREAD_LOCAL: Mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const RELAXED: Mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;

type Status = CUstreamCaptureStatus;
const NONE: Status = Status::CU_STREAM_CAPTURE_STATUS_NONE;
const ACTIVE: Status = Status::CU_STREAM_CAPTURE_STATUS_ACTIVE;
const INVALIDATED: Status = Status::CU_STREAM_CAPTURE_STATUS_INVALIDATED;

const UNSUPPORTED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
const LOST: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;

fn begin(stream: CUstream, mode: Mode) -> CUresult {
    unsafe { cuStreamBeginCapture_v2(stream, mode) }
}

/// Returns a stream in which a capture has begun.
fn capturing(mode: Mode) -> CUstream {
    let stream = non_blocking_stream();
    assert_eq!(begin(stream, mode), OK);
    stream
}

fn end(stream: CUstream) -> Result<CUgraph, CUresult> {
    get(|out| unsafe { cuStreamEndCapture(stream, out) })
}

fn status(stream: CUstream) -> Status {
    get(|out| unsafe { cuStreamIsCapturing(stream, out) }).unwrap()
}

/// The results of `cuStreamGetCaptureInfo`.
struct Info {
    status: Status,
    capture: cuuint64_t,
    graph: CUgraph,
    after: Vec<CUgraphNode>,
}

fn info(stream: CUstream) -> Info {
    let (mut status, mut capture, mut graph) = (NONE, 0, null_mut());
    let (mut after, mut edges, mut count) = (null(), null(), 0);
    let code = unsafe {
        cuStreamGetCaptureInfo_v3(
            stream,
            &mut status,
            &mut capture,
            &mut graph,
            &mut after,
            &mut edges,
            &mut count,
        )
    };
    assert_eq!(code, OK);
    let after = (0..count).map(|place| unsafe { *after.add(place) });
    Info {
        status,
        capture,
        graph,
        after: after.collect(),
    }
}

/// Returns the direct dependencies of a node, at most `room` of them.
fn dependencies(node: CUgraphNode, room: usize) -> Result<Vec<CUgraphNode>, CUresult> {
    let mut count = room;
    let mut found = vec![null_mut(); room];
    let edge = CUgraphEdgeData {
        from_port: 9,
        to_port: 9,
        type_: 9,
        reserved: [9; 5],
    };
    let mut edges = vec![edge; room];
    let code = unsafe {
        cuGraphNodeGetDependencies_v2(node, found.as_mut_ptr(), edges.as_mut_ptr(), &mut count)
    };
    if code != OK {
        return Err(code);
    }
    found.truncate(count);
    let plain = |edge: &CUgraphEdgeData| edge.type_ == 0 && edge.from_port == 0;
    assert_eq!(edges.iter().filter(|edge| plain(edge)).count(), found.len());
    Ok(found)
}

fn record(event: CUevent, stream: CUstream) {
    assert_eq!(unsafe { cuEventRecord(event, stream) }, OK);
}

fn wait(stream: CUstream, event: CUevent) -> CUresult {
    unsafe { cuStreamWaitEvent(stream, event, 0) }
}

#[test]
fn captured_work_is_not_done() {
    let driver = Driver::start();
    let stream = non_blocking_stream();
    let address = allocate(PAGE).unwrap();
    assert_eq!(status(stream), NONE);
    assert_eq!(begin(stream, GLOBAL), OK);
    assert_eq!(begin(stream, GLOBAL), CUresult::CUDA_ERROR_ILLEGAL_STATE);
    fill_in(stream, address, 1, 1);
    assert_eq!(status(stream), ACTIVE);
    let info = info(stream);
    assert_eq!((info.status, info.after.len()), (ACTIVE, 1));
    assert_ne!(info.capture, 0);
    let graph = end(stream).unwrap();
    assert_eq!(status(stream), NONE);
    assert_eq!(synchronize(stream), OK);
    assert_eq!(read(address, 1).unwrap(), [0]);
    assert_eq!(graph, info.graph);
    assert_eq!(driver.live().graphs, 1);
    assert_eq!(unsafe { cuGraphDestroy(graph) }, OK);
    assert_eq!(driver.live().graphs, 0);
    assert_eq!(end(stream), Err(CUresult::CUDA_ERROR_ILLEGAL_STATE));
}

#[test]
fn unsafe_calls_fail_and_spoil_the_capture() {
    let _driver = Driver::start();
    let point = event();
    let address = allocate(PAGE).unwrap();
    let other = non_blocking_stream();
    let calls: [(&str, &dyn Fn() -> CUresult); 9] = [
        ("allocate", &|| allocate(PAGE).err().unwrap_or(OK)),
        ("free", &|| free(address)),
        ("query", &|| unsafe { cuEventQuery(point) }),
        ("query another stream", &|| unsafe { cuStreamQuery(other) }),
        ("synchronize another stream", &|| synchronize(other)),
        ("allocate in another stream", &|| {
            get(|out| unsafe { cuMemAllocAsync(out, PAGE, other) })
                .err()
                .unwrap_or(OK)
        }),
        ("free in another stream", &|| unsafe {
            cuMemFreeAsync(address, other)
        }),
        ("read", &|| read(address, 1).err().unwrap_or(OK)),
        ("pin", &|| {
            get(|out| unsafe { cuMemHostAlloc(out, 1, 0) })
                .err()
                .unwrap_or(OK)
        }),
    ];
    for (name, call) in calls {
        for mode in [GLOBAL, THREAD_LOCAL] {
            let stream = capturing(mode);
            assert_eq!(call(), UNSUPPORTED, "{name}");
            assert_eq!(status(stream), INVALIDATED, "{name}");
            let address_of_work = unsafe { cuMemsetD8Async(address, 1, 1, stream) };
            assert_eq!(address_of_work, LOST, "{name}");
            assert_eq!(end(stream), Err(LOST), "{name}");
            assert_eq!(status(stream), NONE, "{name}");
        }
    }
    let stream = capturing(RELAXED);
    assert!(allocate(PAGE).is_ok());
    assert_eq!(synchronize(other), OK);
    assert!(end(stream).is_ok());
}

#[test]
fn a_fill_that_need_not_wait_is_allowed_during_captures() {
    let _driver = Driver::start();
    let address = allocate(PAGE).unwrap();
    let stream = capturing(GLOBAL);
    assert_eq!(unsafe { cuMemsetD8_v2(address, 1, PAGE) }, OK);
    assert!(end(stream).is_ok());
    assert_eq!(read(address, 1).unwrap(), [1]);
}

#[test]
fn a_relaxed_thread_may_call_what_is_unsafe() {
    let _driver = Driver::start();
    let stream = capturing(GLOBAL);
    let mut mode = RELAXED;
    assert_eq!(unsafe { cuThreadExchangeStreamCaptureMode(&mut mode) }, OK);
    assert_eq!(mode, GLOBAL);
    assert!(allocate(PAGE).is_ok());
    assert_eq!(unsafe { cuThreadExchangeStreamCaptureMode(&mut mode) }, OK);
    assert_eq!(mode, RELAXED);
    assert_eq!(status(stream), ACTIVE);
    assert_eq!(allocate(PAGE), Err(UNSUPPORTED));
    assert_eq!(end(stream), Err(LOST));
}

#[test]
fn other_threads_are_bound_by_global_captures_unless_they_look_after_themselves() {
    let _driver = Driver::start();
    let allocate_elsewhere = |mut mode: Mode| {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                make_current(0);
                let exchanged = unsafe { cuThreadExchangeStreamCaptureMode(&mut mode) };
                assert_eq!((exchanged, mode), (OK, GLOBAL));
                allocate(PAGE).map(|_| ())
            });
            other.join().unwrap()
        })
    };
    for (capture, thread, expected) in [
        (GLOBAL, GLOBAL, Err(UNSUPPORTED)),
        (GLOBAL, THREAD_LOCAL, Ok(())),
        (GLOBAL, RELAXED, Ok(())),
        (THREAD_LOCAL, GLOBAL, Ok(())),
        (RELAXED, GLOBAL, Ok(())),
    ] {
        let stream = capturing(capture);
        assert_eq!(
            allocate_elsewhere(thread),
            expected,
            "{capture:?} {thread:?}"
        );
        assert_eq!(
            end(stream).is_ok(),
            expected.is_ok(),
            "{capture:?} {thread:?}"
        );
    }
}

#[test]
fn virtual_memory_is_allowed_during_captures() {
    let _driver = Driver::start();
    let stream = capturing(GLOBAL);
    let (address, handle) = (reserve(PAGE), create(PAGE).unwrap());
    assert_eq!(map(address, PAGE, handle), OK);
    assert_eq!(allow(address, PAGE, 0), OK);
    assert_eq!(unsafe { cuMemUnmap(address, PAGE) }, OK);
    assert_eq!(unsafe { cuMemRelease(handle) }, OK);
    assert!(end(stream).is_ok());
}

#[test]
fn captured_streams_and_events_cannot_be_asked_or_awaited() {
    let _driver = Driver::start();
    let point = event();
    let mut mode = RELAXED;
    // Not even a relaxed thread may make these calls.
    assert_eq!(unsafe { cuThreadExchangeStreamCaptureMode(&mut mode) }, OK);
    type Call<'a> = &'a dyn Fn(CUstream) -> CUresult;
    let calls: [(&str, Call, CUresult); 5] = [
        (
            "query",
            &|stream| unsafe { cuStreamQuery(stream) },
            UNSUPPORTED,
        ),
        ("synchronize", &|stream| synchronize(stream), UNSUPPORTED),
        ("context", &|_| unsafe { cuCtxSynchronize() }, UNSUPPORTED),
        (
            "query event",
            &|stream| {
                record(point, stream);
                unsafe { cuEventQuery(point) }
            },
            CUresult::CUDA_ERROR_CAPTURED_EVENT,
        ),
        (
            "synchronize event",
            &|stream| {
                record(point, stream);
                unsafe { cuEventSynchronize(point) }
            },
            CUresult::CUDA_ERROR_CAPTURED_EVENT,
        ),
    ];
    for (name, call, expected) in calls {
        let stream = capturing(RELAXED);
        assert_eq!(call(stream), expected, "{name}");
        assert_eq!(end(stream), Err(LOST), "{name}");
    }
    assert_eq!(unsafe { cuThreadExchangeStreamCaptureMode(&mut mode) }, OK);
    // The capture has ended, and the event still has no point in time.
    assert_eq!(
        unsafe { cuEventQuery(point) },
        CUresult::CUDA_ERROR_CAPTURED_EVENT
    );
    let stream = non_blocking_stream();
    record(point, stream);
    assert_eq!(unsafe { cuEventSynchronize(point) }, OK);
}

#[test]
fn streams_join_by_events_and_must_come_back() {
    let _driver = Driver::start();
    let address = allocate(PAGE).unwrap();
    let (fork, join) = (event(), event());
    let side = non_blocking_stream();

    let origin = capturing(GLOBAL);
    record(fork, origin);
    assert_eq!(wait(side, fork), OK);
    assert_eq!(status(side), ACTIVE);
    fill_in(side, address, 1, 1);
    assert_eq!(
        end(side),
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)
    );
    record(join, side);
    assert_eq!(wait(origin, join), OK);
    assert!(end(origin).is_ok());
    assert_eq!(status(side), NONE);

    let origin = capturing(GLOBAL);
    record(fork, origin);
    assert_eq!(wait(side, fork), OK);
    record(join, side);
    fill_in(side, address, 1, 1);
    assert_eq!(wait(origin, join), OK);
    assert_eq!(
        end(origin),
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
    );
    assert_eq!(status(side), NONE);
}

#[test]
fn nodes_say_what_they_come_after() {
    let _driver = Driver::start();
    let address = allocate(PAGE).unwrap();
    let (fork, join) = (event(), event());
    let (origin, side) = (capturing(GLOBAL), non_blocking_stream());
    // An event is a position in the graph, not a node.
    record(fork, origin);
    assert_eq!(wait(side, fork), OK);
    assert_eq!((info(origin).after, info(side).after), (vec![], vec![]));
    assert_eq!(info(origin).capture, info(side).capture);
    fill_in(origin, address, 1, 1);
    fill_in(side, address, 1, 1);
    let (first, second) = (info(origin).after, info(side).after);
    record(join, side);
    assert_eq!(wait(origin, join), OK);
    let both = [first.clone(), second.clone()].concat();
    assert_eq!(info(origin).after, both);
    assert_eq!(wait(origin, join), OK);
    assert_eq!(info(origin).after, both);

    fill_in(origin, address, 1, 1);
    let last = info(origin).after;
    assert_eq!(last.len(), 1);
    assert_eq!(dependencies(last[0], 2), Ok(both.clone()));
    assert_eq!(dependencies(last[0], 1), Ok(first.clone()));
    assert_eq!(dependencies(last[0], 3), Ok(both));
    assert_eq!(dependencies(first[0], 1), Ok(vec![]));
    let count = get(|count| unsafe {
        cuGraphNodeGetDependencies_v2(last[0], null_mut(), null_mut(), count)
    });
    assert_eq!(count, Ok(2));
    assert!(end(origin).is_ok());
    let gone = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(dependencies(last[0], 1), gone);
    assert_eq!(info(origin).status, NONE);
}

#[test]
fn captures_do_not_depend_on_anything_outside() {
    let _driver = Driver::start();
    let outside = event();
    record(outside, non_blocking_stream());
    let stream = capturing(GLOBAL);
    let isolation = CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    assert_eq!(wait(stream, outside), isolation);
    assert_eq!(end(stream), Err(LOST));

    let (one, two) = (capturing(RELAXED), capturing(RELAXED));
    record(outside, one);
    assert_eq!(
        wait(two, outside),
        CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE
    );
    assert_eq!((end(one), end(two)), (Err(LOST), Err(LOST)));
}

#[test]
fn the_legacy_stream_cannot_capture_nor_wait_for_what_does() {
    let _driver = Driver::start();
    assert_eq!(begin(null_mut(), GLOBAL), UNSUPPORTED);
    let implicit = CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    let blocking = get(|out| unsafe { cuStreamCreate(out, 0) }).unwrap();
    let address = allocate(PAGE).unwrap();
    assert_eq!(begin(blocking, GLOBAL), OK);
    let asked = get(|out| unsafe { cuStreamIsCapturing(null_mut(), out) });
    assert_eq!(asked, Err(implicit));
    assert_eq!(status(blocking), ACTIVE);
    assert_eq!(
        unsafe { cuMemsetD8Async(address, 1, 1, null_mut()) },
        implicit
    );
    assert_eq!(end(blocking), Err(LOST));
    // A non-blocking stream does not affect the legacy stream.
    let stream = capturing(GLOBAL);
    assert_eq!(unsafe { cuMemsetD8Async(address, 1, 1, null_mut()) }, OK);
    assert!(end(stream).is_ok());
}

#[test]
fn only_relaxed_captures_end_in_another_thread() {
    let _driver = Driver::start();
    let end_elsewhere = |stream: CUstream| {
        let name = stream as usize;
        let ended = std::thread::spawn(move || end(name as CUstream).map(|_| ()));
        ended.join().unwrap()
    };
    let stream = capturing(THREAD_LOCAL);
    let wrong_thread = CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    assert_eq!(end_elsewhere(stream), Err(wrong_thread));
    assert!(end(stream).is_ok());
    let stream = capturing(RELAXED);
    assert_eq!(end_elsewhere(stream), Ok(()));
}

#[test]
fn a_capture_whose_stream_is_destroyed_is_gone() {
    let _driver = Driver::start();
    let stream = capturing(GLOBAL);
    let (fork, side) = (event(), non_blocking_stream());
    record(fork, stream);
    assert_eq!(wait(side, fork), OK);
    assert_eq!(unsafe { cuStreamDestroy_v2(stream) }, OK);
    assert_eq!(status(side), NONE);
    assert!(allocate(PAGE).is_ok());
}
