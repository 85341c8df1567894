//! What a region takes of its process: the allocator of its device, waits for that, and who is notified of pauses.

use std::sync::atomic::Ordering;

use lowtide_core::{Bytes, DriverError, MempoolId, Stream};
use lowtide_cuda::CudaDriver;
use lowtide_region::Device;

use super::card::{self, Card};
use crate::devices::Allocator;
use crate::events;
use crate::preload::is_of_thread;
use crate::record::now_us;

impl Device for Card {
    type Driver = CudaDriver;

    fn allocator(&self) -> &Allocator {
        card::allocator(self.ordinal)
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        self.device.synchronize()
    }

    /// The driver would take the number of a thread's default stream for a pointer.
    fn can_wait_for(&self, stream: Stream) -> bool {
        !is_of_thread(stream)
    }

    fn margin(&self) -> Bytes {
        card::margin()
    }

    fn notify(&self, is_leaving: bool, has_pool: impl Fn(MempoolId) -> bool) {
        // What fails here is a lock of lowtide's that a panic has poisoned, which the next call says.
        let _ = events::with_listeners(|listeners| {
            let away_us = if is_leaving { now_us() } else { 0 };
            self.notified_away_us.store(away_us, Ordering::Relaxed);
            if listeners.is_empty() {
                // To picture all blocks takes a while, under the lock under which threads allocate.
                return Ok(());
            }
            Ok(self.allocator().with_pools(|lane| {
                let mut segments = lane.segments();
                segments.retain(|segment| has_pool(segment.pool));
                let event = |segment| events::pause_event(is_leaving, segment);
                let events: Vec<_> = segments.iter().map(event).collect();
                listeners.notify_of_pause(self.ordinal, &self.tag, events);
            })?)
        });
    }
}
