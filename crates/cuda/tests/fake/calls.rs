//! Makes every call once and checks contents. Then does so with every strategy.

use std::thread;

use lowtide_core::{Bytes, Driver, DriverError, Stream};
use lowtide_cuda::{CaptureStatus, CudaDriver};

use super::common::steps;
use super::control::{Fake, Live};

const STREAM_CAPTURE_UNSUPPORTED: u32 = 900;

#[test]
fn a_device_describes_itself() {
    let fake = Fake::start();
    let device = fake.device();
    steps::describe(device.library(), &device).unwrap();
    assert_eq!(device.name().unwrap(), "fakecuda device 0");
    assert_eq!(device.total_memory().unwrap(), Bytes::gib(8));
    assert_eq!(device.ordinal(), 0);
    assert_eq!(fake.live(), Live::default(), "asking takes nothing");
}

#[test]
fn every_call_does_what_it_says() {
    let fake = Fake::start();
    let mut driver = fake.driver();
    let (program, streams) = fake.program();
    steps::plain_memory(&mut driver).unwrap();
    steps::virtual_memory(&mut driver).unwrap();
    steps::export_and_import(&mut driver).unwrap();
    steps::import_range(&mut driver).unwrap();
    steps::events(&mut driver, streams).unwrap();
    steps::capture(&mut driver, &program, streams[0]).unwrap();
    steps::captured_order(&mut driver, &program, streams).unwrap();
    steps::errors(&mut driver).unwrap();
    assert!(driver.supports_export());
    drop(driver);
    // The program's own streams, context and graphs are left.
    let left = Live {
        contexts: 1,
        streams: 2,
        graphs: 2,
        ..Live::default()
    };
    assert_eq!(fake.live(), left);
    assert_eq!(fake.used_bytes(), 0);
}

#[test]
fn peers_use_each_others_memory() {
    if !Fake::has_two_devices("calls::peers_use_each_others_memory") {
        return;
    }
    let fake = Fake::start();
    let mut driver = fake.driver();
    let found = steps::peers(driver.device().clone().library(), &mut driver).unwrap();
    assert_eq!(found, "as it should be");
    assert_eq!(fake.used_bytes(), 0);
}

/// A tensor of another process can arrive before this process first copies between its devices.
#[test]
fn a_new_peer_uses_memory_that_was_imported_before() {
    if !Fake::has_two_devices("calls::a_new_peer_uses_memory_that_was_imported_before") {
        return;
    }
    let fake = Fake::start();
    let mut driver = fake.driver();
    let size = driver.granularity();
    let handle = driver.create(size).unwrap();
    let descriptor = driver.export(handle).unwrap();
    let mut held = driver.begin_import(size).unwrap();
    driver.import_part(&mut held, &descriptor, size).unwrap();
    driver.finish_import(&held).unwrap();
    let imported = held.address().unwrap();

    let peer = driver.device().library().device(1).unwrap();
    let mut other = fake.driver_of(peer.clone());
    driver.allow_peer(&peer, &[]).unwrap();
    other.fill(imported, size, 4, Stream::DEFAULT).unwrap();
    other.synchronize_stream(Stream::DEFAULT).unwrap();
    let mut copy = [0; 16];
    driver.read(imported, &mut copy).unwrap();
    assert_eq!(copy, [4; 16]);

    driver.end_import(&mut held).unwrap();
    driver.release(handle).unwrap();
    assert_eq!(fake.used_bytes(), 0);
}

#[test]
fn an_event_is_recorded_in_another_devices_stream() {
    if !Fake::has_two_devices("calls::an_event_is_recorded_in_another_devices_stream") {
        return;
    }
    let fake = Fake::start();
    let mut driver = fake.driver();
    let (program, _) = fake.program();
    steps::foreign_stream(&mut driver, &program).unwrap();
    assert_eq!(
        fake.live().events,
        1,
        "one that refused, and no foreign one"
    );
    // A failure in that device's context is reported and leaks nothing.
    program.use_device(1).unwrap();
    let stream = program.create_stream().unwrap();
    program.use_device(0).unwrap();
    let events = fake.live().events;
    for (call, nth) in [
        ("cuEventRecord", 2),
        ("cuStreamGetCtx", 1),
        ("cuEventCreate", 1),
    ] {
        fake.fail(call, nth, 999);
        assert!(driver.record_event(stream).is_err(), "{call}");
        assert_eq!(fake.live().events, events, "{call}");
    }
    let event = driver.record_event(stream).unwrap();
    driver.release_event(event);
    drop(driver);
    assert_eq!(fake.live().events, 0);
}

#[test]
fn a_thread_keeps_its_current_context() {
    let fake = Fake::start();
    let mut driver = fake.driver();
    let (program, [stream, _]) = fake.program();
    let current = program.current_context().unwrap();
    assert_ne!(current, 0);
    let pushes = fake.calls("cuCtxPushCurrent_v2");
    use_every_group_of_calls(&mut driver, stream);
    assert_eq!(program.current_context().unwrap(), current);
    assert_eq!(fake.calls("cuCtxPushCurrent_v2"), pushes, "it was current");

    thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(program.current_context().unwrap(), 0);
            use_every_group_of_calls(&mut driver, stream);
            assert_eq!(program.current_context().unwrap(), 0);
            assert!(fake.calls("cuCtxPushCurrent_v2") > pushes);
        });
    });
}

fn use_every_group_of_calls(driver: &mut CudaDriver, stream: Stream) {
    steps::plain_memory(driver).unwrap();
    steps::virtual_memory(driver).unwrap();
    let event = driver.record_event(stream).unwrap();
    driver.synchronize_event(event).unwrap();
    driver.release_event(event);
    driver.synchronize_stream(stream).unwrap();
    driver.capture_status(stream).unwrap();
}

/// Shows that the stand-in is as strict as a card, so that the capture step proves something.
#[test]
fn memory_calls_of_others_spoil_a_capture() {
    let fake = Fake::start();
    let mut driver = fake.driver();
    let (program, [stream, _]) = fake.program();
    program.begin_capture(stream).unwrap();
    assert_eq!(fake.allocate_unguarded(), STREAM_CAPTURE_UNSUPPORTED);
    let status = driver.capture_status(stream).unwrap();
    assert_eq!(status, CaptureStatus::Invalidated);
    assert!(driver.is_in_capture(stream), "until it has ended");
    assert_eq!(driver.capture_of(stream), None);
    assert_eq!(driver.capture_point(stream), None);
    assert!(program.end_capture(stream).is_err());
    assert_eq!(driver.capture_status(stream).unwrap(), CaptureStatus::None);

    // The guard makes the difference, and only while it exists.
    program.begin_capture(stream).unwrap();
    let relaxed = driver.device().library().relax_capture().unwrap();
    assert_eq!(fake.allocate_unguarded(), 0);
    drop(relaxed);
    assert_eq!(fake.allocate_unguarded(), STREAM_CAPTURE_UNSUPPORTED);
    assert!(program.end_capture(stream).is_err());
}

/// Work of the default stream would wait for a capture of a stream that waits for the default stream.
#[test]
fn the_default_stream_is_in_the_captures_that_it_would_wait_for() {
    let fake = Fake::start();
    let mut driver = fake.driver();
    let (program, [other, _]) = fake.program();
    let stream = program.create_stream_with(0).unwrap();
    let in_capture = |driver: &mut CudaDriver| {
        let streams = [Stream::DEFAULT, stream, other, Stream(3)];
        streams.map(|stream| driver.is_in_capture(stream))
    };
    assert_eq!(in_capture(&mut driver), [false; 4]);
    program.begin_capture(stream).unwrap();
    assert_eq!(in_capture(&mut driver), [true, true, false, false]);
    program.end_capture(stream).unwrap();
    assert_eq!(in_capture(&mut driver), [false; 4]);
}

#[test]
fn an_event_passes_when_its_stream_gets_there() {
    let fake = Fake::start();
    let mut driver = fake.driver();
    let (_, [stream, other]) = fake.program();
    fake.hold(stream, true);
    let address = driver.allocate(Bytes(4096)).unwrap();
    driver.fill(address, Bytes(4096), 9, stream).unwrap();
    let event = driver.record_event(stream).unwrap();
    driver.wait_event(other, event).unwrap();
    let behind = driver.record_event(other).unwrap();
    assert!(!driver.query_event(event).unwrap());
    assert!(!driver.query_event(behind).unwrap());
    fake.hold(stream, false);
    driver.synchronize_event(behind).unwrap();
    assert!(driver.query_event(event).unwrap());
    let mut copy = [0; 4096];
    driver.read(address, &mut copy).unwrap();
    assert_eq!(copy, [9; 4096]);
    driver.free(address, Bytes(4096)).unwrap();
}

#[test]
fn events_are_made_once_and_used_again() {
    let fake = Fake::start();
    let mut driver = fake.driver();
    for _ in 0..10 {
        let pair = [(); 2].map(|()| driver.record_event(Stream::DEFAULT).unwrap());
        assert_ne!(pair[0], pair[1]);
        for event in pair {
            driver.release_event(event);
        }
    }
    assert_eq!(fake.calls("cuEventCreate"), 2);
    drop(driver);
    assert_eq!(fake.live(), Live::default());
}

#[test]
fn errors_are_the_drivers_own_words() {
    let fake = Fake::start();
    let mut driver = fake.driver();
    let mut error_of = |code| {
        fake.fail("cuMemAlloc_v2", 1, code);
        driver.allocate(Bytes(512)).unwrap_err()
    };
    assert_eq!(error_of(2), DriverError::OutOfMemory);
    let call = "cuMemAlloc_v2";
    assert_eq!(error_of(801), DriverError::Unsupported { call });
    assert_eq!(
        error_of(1).to_string(),
        "cuMemAlloc_v2 failed with error 1: invalid argument (CUDA_ERROR_INVALID_VALUE)"
    );
    let text = error_of(123_456).to_string();
    assert!(
        text.starts_with("cuMemAlloc_v2 failed with error 123456: "),
        "{text}"
    );

    fake.fail("cuGetErrorString", 1, 1);
    assert_eq!(
        error_of(1).to_string(),
        "cuMemAlloc_v2 failed with error 1: CUDA_ERROR_INVALID_VALUE"
    );
    fake.fail("cuGetErrorString", 1, 1);
    fake.fail("cuGetErrorName", 1, 1);
    assert_eq!(
        error_of(1).to_string(),
        "cuMemAlloc_v2 failed with error 1: the driver has no words for it"
    );
}

#[test]
fn contents_survive_every_strategy() {
    for config in lowtide_sim::program::configs() {
        let fake = Fake::start();
        let driver = fake.driver();
        fake.set_capacity(Bytes::mib(512).get());
        let (_, mut streams) = fake.program();
        if config.to_string().contains("allow_growth:False") {
            // The first stream gets the whole device.
            streams[1] = streams[0];
        }
        let found = steps::strategy(driver, &config, streams, 1000, Bytes::mib(1));
        found.unwrap_or_else(|error| panic!("{config}: {error}"));
        assert_eq!(fake.used_bytes(), 0, "{config}");
        assert_eq!(fake.live().events, 0, "{config}");
    }
}

/// A page that is created only to be released could be the page that the job asks for.
#[test]
fn the_last_memory_of_a_device_is_not_created_for_its_scrubbing() {
    let fake = Fake::start();
    let mut driver = fake.driver();
    let mut calls = |capacity| {
        fake.set_capacity(Bytes::mib(capacity).get());
        let before = ["cuMemCreate", "cuMemRelease"].map(|name| fake.calls(name));
        driver.reclaim_scrubbed();
        let after = ["cuMemCreate", "cuMemRelease"].map(|name| fake.calls(name));
        (after[0] - before[0], after[1] - before[1])
    };
    assert_eq!(calls(256), (1, 1));
    assert_eq!(calls(255), (0, 0));
    assert_eq!(fake.used_bytes(), 0);
}
