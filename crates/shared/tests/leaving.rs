//! Observers are notified of a release while the memory is still mapped, and notified again if the driver refuses
//! it.
#![expect(clippy::unwrap_used, reason = "in what the tests share")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use lowtide_core::{
    Action, BfcConfig, BlockStatus, Bytes, Config, DeviceAddress, DriverError, Event, Observer,
    SegmentSnapshot, Stream,
};
use lowtide_shared::SharedAllocator;
use lowtide_sim::program::configs;
use lowtide_sim::{Call, FaultPlan, SimConfig, SimDriver};

type Allocator = SharedAllocator<SimDriver>;

/// The state that an observer of every event infers.
#[derive(Default)]
struct Picture {
    /// Bytes of physical memory that segments hold.
    reserved: u64,
    /// The requested size of every allocated block, by address.
    held: BTreeMap<DeviceAddress, Bytes>,
    /// Number of freed blocks that wait for other streams.
    pending: usize,
    /// How often memory was released.
    left: u64,
}

impl Picture {
    fn note(&mut self, event: &Event) {
        match event.action {
            Action::Alloc => {
                let before = self.held.insert(event.address, event.size);
                assert_eq!(before, None, "{event:?}");
            }
            Action::FreeRequested => {
                assert_eq!(self.held.remove(&event.address), Some(event.size));
                self.pending += 1;
            }
            Action::FreeCompleted => self.pending -= 1,
            Action::SegmentAlloc | Action::SegmentMap => self.reserved += event.size.get(),
            Action::SegmentFree | Action::SegmentUnmap => {
                self.reserved -= event.size.get();
                self.left += 1;
            }
            Action::Snapshot | Action::OutOfMemory => {}
            Action::SegmentPaused | Action::SegmentResumed | Action::Annotate => {
                panic!("no allocator makes this event: {event:?}")
            }
        }
    }

    fn assert_shows(&self, segments: &[SegmentSnapshot], of: &str) {
        let blocks = || segments.iter().flat_map(|segment| &segment.blocks);
        let held = blocks().filter(|block| block.status == BlockStatus::Allocated);
        let held: BTreeMap<_, _> = held.map(|block| (block.address, block.requested)).collect();
        assert_eq!(self.held, held, "{of}");
        let pending = blocks().filter(|block| block.status == BlockStatus::PendingFree);
        assert_eq!(self.pending, pending.count(), "{of}");
        let reserved: Bytes = segments.iter().map(|segment| segment.size).sum();
        assert_eq!(Bytes(self.reserved), reserved, "{of}");
    }
}

/// Sets the wait for other threads to zero: no thread frees memory while a request waits.
fn without_wait(config: Config) -> Config {
    match config {
        Config::Bfc(bfc) => Config::Bfc(BfcConfig { retry_ms: 0, ..bfc }),
        other => other,
    }
}

fn allocator(config: &Config) -> Arc<Allocator> {
    let driver = SimDriver::new(SimConfig {
        capacity: Some(Bytes::mib(128)),
        ..SimConfig::default()
    });
    Arc::new(SharedAllocator::new(
        driver,
        0,
        config,
        Arc::default(),
        None,
    ))
}

/// Returns how many release calls the driver received.
fn given_back(driver: &SimDriver) -> u64 {
    driver.stats(Call::Free).count + driver.stats(Call::Unmap).count
}

/// Builds a picture from an allocator's events. At each release event, the memory must still be there, and the
/// driver must have received exactly the calls of earlier releases.
fn observe(allocator: &Arc<Allocator>, config: &Config) -> Arc<Mutex<Picture>> {
    // A frame of `tide` may be shown elsewhere without a call, and views go that show nothing.
    let counts = !matches!(config, Config::Tide(_));
    let picture = Arc::new(Mutex::new(Picture::default()));
    let (drawn, observed) = (Arc::clone(&picture), Arc::downgrade(allocator));
    let note = move |event: &Event| {
        let mut picture = drawn.lock().unwrap();
        if matches!(event.action, Action::SegmentFree | Action::SegmentUnmap) {
            // The driver's lock is the last in the lock order, so it can be taken here.
            let allocator = Weak::upgrade(&observed).unwrap();
            let mut physical = allocator.physical();
            let driver = physical.driver_mut();
            assert_eq!(
                driver.access(event.address, event.size),
                Ok(()),
                "{event:?}"
            );
            if counts {
                assert_eq!(given_back(driver), picture.left, "{event:?}");
            }
        }
        picture.note(event);
    };
    let observer = move |events: &[Event]| events.iter().for_each(&note);
    let observer: Observer = Arc::new(observer);
    let observed = allocator.observe_events(Some(&observer));
    observed.unwrap();
    picture
}

/// Allocates and releases memory in every way, whether or not the calls fail.
fn work(allocator: &Allocator) {
    let streams = [Stream::DEFAULT, Stream(1)];
    let request = |mib, stream| {
        allocator
            .allocate(Bytes::mib(mib), stream, || Ok(false))
            .ok()
    };
    let mut blocks = Vec::new();
    for stream in streams {
        blocks.extend(
            [1, 30, 3]
                .into_iter()
                .filter_map(|mib| request(mib, stream)),
        );
    }
    for &block in blocks.iter().step_by(2) {
        let _ = allocator.with_block(block, |lane| lane.record_stream(block, Stream(2)));
    }
    let free = |&block: &DeviceAddress| {
        let freed = allocator.with_block(block, |lane| lane.free(block));
        freed.is_err()
    };
    blocks.retain(free);
    // More than is free on the device in addition to cached memory.
    blocks.extend(request(100, streams[1]));
    blocks.retain(free);
    let _ = allocator.with_all(|device| device.empty_cache(None));
    blocks.extend(request(2, streams[0]));
}

#[test]
fn memory_is_there_still_when_its_release_is_notified() {
    for config in configs().into_iter().map(without_wait) {
        let allocator = allocator(&config);
        let picture = observe(&allocator, &config);
        work(&allocator);
        let picture = picture.lock().unwrap();
        if !matches!(config, Config::Tide(_)) {
            assert_eq!(given_back(allocator.physical().driver()), picture.left);
        }
        if config.to_conf() != "allow_growth:False" {
            assert!(picture.left > 0, "{config}");
        }
    }
}

/// Only release calls fail: then the number of reported releases equals the number of calls.
#[test]
fn an_end_that_the_driver_refused_is_corrected() {
    for config in configs().into_iter().map(without_wait) {
        for call in [Call::Free, Call::Unmap] {
            for nth in 1..12 {
                let allocator = allocator(&config);
                let picture = observe(&allocator, &config);
                let fault = FaultPlan::nth(
                    call,
                    nth,
                    DriverError::Failed {
                        call: "free",
                        code: 1,
                        message: String::new(),
                    },
                );
                allocator.physical().driver_mut().set_faults(fault);
                work(&allocator);
                let snapshot = allocator.with_all(|device| device.snapshot()).unwrap();
                let of = format!("{config}: {call:?} {nth}");
                picture
                    .lock()
                    .unwrap()
                    .assert_shows(&snapshot.segments, &of);
            }
        }
    }
}
