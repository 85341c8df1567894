//! What a region needs from this process: the device's allocator and backups, waits, threads, and notifying observers.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use lowtide_core::{Bytes, DriverError, MempoolId};
use lowtide_cuda::{CudaBackups, CudaDriver, SignalsBlocked};
use lowtide_region::{Device, RegionError};
use lowtide_shared::LaneOf;

use super::card::{self, Card};
use super::{backups, scrubbing};
use crate::devices::{self, Allocator};
use crate::events;
use crate::record::recorder::now_us;

impl Device for Card {
    type Driver = CudaDriver;
    type Backups = CudaBackups;

    fn number(&self) -> u32 {
        self.ordinal.unsigned_abs()
    }

    fn allocator(&self) -> &Allocator {
        devices::get(self.ordinal).expect("a region is on devices in use")
    }

    fn lock_backups(&self) -> Result<MutexGuard<'_, CudaBackups>, RegionError> {
        backups::lock(&self.device)
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        self.device.synchronize()
    }

    fn margin(&self) -> Bytes {
        card::margin()
    }

    fn notify(&self, tag: &Arc<str>, is_leaving: bool, has_pool: impl Fn(MempoolId) -> bool) {
        // Fails only if a panic has poisoned a lock, which the next call reports.
        let _ = events::with_listeners(|listeners| {
            let paused_us = if is_leaving { now_us() } else { 0 };
            self.notified_pause_us.store(paused_us, Ordering::Relaxed);
            if listeners.is_empty() {
                // Listing the segments takes a while, under the lock that allocating threads need.
                return Ok(());
            }
            Ok(self.allocator().with_lane(LaneOf::Pools, |lane| {
                let mut segments = lane.segments();
                segments.retain(|segment| has_pool(segment.pool));
                let event = |segment| events::pause_event(is_leaving, segment);
                let events: Vec<_> = segments.iter().map(event).collect();
                listeners.notify_of_pause(self.ordinal, tag, events);
                Ok(())
            })?)
        });
    }

    fn block_signals(&self) -> impl Sized {
        SignalsBlocked::begin()
    }

    fn finish_change(&self, moved: Bytes) {
        scrubbing::begin(self.ordinal, moved);
    }
}
