//! Graph captures through the exported functions. The stand-in driver captures the streams.
#![expect(unsafe_code, reason = "calls C functions")]
#![expect(clippy::unwrap_used, reason = "in what the tests share")]

mod common;

use std::ffi::c_void;

use common::{Fake, allocate, allocate_on, isolated, stat};
use lowtide::*;

const REUSES: (&str, &str) = ("LOWTIDE_CONF", "graph_capture_record_stream_reuse:True");
const SHARED_SIZE: usize = 3 << 20;

/// A block that other streams used and that is freed during a capture waits for the capture's end.
#[test]
fn a_capture_asks_no_event() {
    isolated("a_capture_asks_no_event", &[], |fake| {
        let (memory, [own, _]) = use_in_capture(fake, |_, _| ());
        assert_eq!(fake.calls("cuEventQuery"), 0);
        assert_eq!(allocate_on(SHARED_SIZE, 0, own), Ok(memory));
    });
}

/// Work of a stream outside the capture is not in the graph, and may still run after the capture.
#[test]
fn work_beside_a_capture_is_waited_for() {
    isolated("work_beside_a_capture_is_waited_for", &[], |fake| {
        assert_eq!(lowtide_init(1), Status::Ok);
        let [captured, busy] = [fake.stream(), fake.stream()];
        let memory = allocate(SHARED_SIZE, 0).unwrap();
        assert_eq!(lowtide_capture_begin(0), Status::Ok);
        fake.begin_capture(captured);
        fake.hold(busy, true);
        fake.set_bytes(memory, SHARED_SIZE, busy);
        assert_eq!(lowtide_record_stream(memory, busy), Status::Ok);
        assert_eq!(lowtide_deallocate(memory), Status::Ok);
        fake.end_capture(captured);
        assert_eq!(lowtide_capture_end(0), Status::Ok);
        assert_ne!(allocate(SHARED_SIZE, 0), Ok(memory));
        fake.hold(busy, false);
        assert!(fake.synchronize(busy));
        assert_eq!(allocate(SHARED_SIZE, 0), Ok(memory));
    });
}

/// As with PyTorch's `graph_capture_record_stream_reuse`: freed memory is reused in the same capture if the graph
/// orders all its uses before.
#[test]
fn a_capture_reuses_what_its_order_allows() {
    isolated(
        "a_capture_reuses_what_its_order_allows",
        &[REUSES],
        |fake| {
            use_in_capture(fake, |memory, stream| {
                assert_eq!(allocate_on(SHARED_SIZE, 0, stream), Ok(memory));
                assert_eq!(lowtide_deallocate(memory), Status::Ok);
            });
        },
    );
}

/// If the driver does not report the order of a graph, memory stays pending. Nothing else happens.
#[test]
fn a_call_about_a_graph_that_fails_only_puts_reuse_off() {
    let test = "a_call_about_a_graph_that_fails_only_puts_reuse_off";
    let faults = (1..=5).map(|nth| format!("cuStreamGetCaptureInfo_v3:{nth}"));
    let faults = faults.chain((1..=3).map(|nth| format!("cuGraphNodeGetDependencies_v2:{nth}")));
    for fault in faults {
        isolated(test, &[REUSES, ("FAKECUDA_FAIL", &fault)], |fake| {
            let (memory, [own, side]) = use_in_capture(fake, |_, stream| {
                let other = allocate_on(SHARED_SIZE, 0, stream).unwrap();
                assert_eq!(lowtide_deallocate(other), Status::Ok);
            });
            // A stream whose capture was not reported is waited for like one outside the capture.
            assert!(fake.synchronize(side));
            let both = [(); 2].map(|()| allocate_on(SHARED_SIZE, 0, own));
            assert!(both.contains(&Ok(memory)), "{both:?} without {memory:?}");
            assert_eq!(stat(0, "active.all.current"), 2);
        });
    }
}

/// Captures work on a block in its own stream and in another, and frees the block before the streams join. Checks
/// that the block is not free, joins the streams, calls `joined`, and ends the capture. Returns the block and the
/// streams.
fn use_in_capture(
    fake: &Fake,
    joined: fn(*mut c_void, *mut c_void),
) -> (*mut c_void, [*mut c_void; 2]) {
    assert_eq!(lowtide_init(1), Status::Ok);
    let [own, side] = [fake.stream(), fake.stream()];
    assert_eq!(lowtide_capture_begin(0), Status::Ok);
    fake.begin_capture(own);
    let memory = allocate_on(SHARED_SIZE, 0, own).unwrap();
    fake.set_bytes(memory, SHARED_SIZE, own);
    fake.wait(side, own);
    fake.set_bytes(memory, SHARED_SIZE, side);
    assert_eq!(lowtide_record_stream(memory, side), Status::Ok);
    assert_eq!(lowtide_deallocate(memory), Status::Ok);
    let other = allocate_on(SHARED_SIZE, 0, own).unwrap();
    assert_ne!(other, memory);
    assert_eq!(lowtide_deallocate(other), Status::Ok);
    fake.wait(own, side);
    fake.set_bytes(other, SHARED_SIZE, own);
    joined(memory, own);
    fake.end_capture(own);
    assert_eq!(lowtide_capture_end(0), Status::Ok);
    (memory, [own, side])
}
