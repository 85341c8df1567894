//! What the driver puts off when memory goes back to it.
//!
//! Pages that go back are scrubbed by the card beside the job: 32 GiB in 85 ms on an H200. What it has scrubbed becomes
//! free memory within the next call that creates or releases some, and that call takes 7 to 11 ms longer for 32 GiB
//! (bench/record/nvidia-h200/2026-11-23/scrubbing.txt). There is no call for that alone.

use lowtide_core::{Bytes, Driver};

use crate::driver::CudaDriver;
use crate::held::HeldRange;

/// Where the device has less left, the job shall have it all.
const FREE_MIN: Bytes = Bytes::mib(256);

impl CudaDriver {
    /// Has the driver take back what the card has scrubbed by now, so that the next call need not: creates a page and
    /// releases it. Does nothing where the driver cannot, or the device has hardly any memory left.
    ///
    /// 0.2 ms where there is nothing to take back, on an H200.
    pub fn take_back_scrubbed(&mut self) {
        if !self.memory_info().is_ok_and(|info| info.free >= FREE_MIN) {
            return;
        }
        if let Ok(page) = self.create(self.granularity()) {
            self.abandon(HeldRange::of_handle(page));
        }
    }
}
