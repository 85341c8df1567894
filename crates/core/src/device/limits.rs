//! How much memory a device may reserve.

use super::{Device, Lanes};
use crate::driver::DriverError;
use crate::error::AllocError;
use crate::units::Bytes;

impl<L: Lanes> Device<L> {
    /// Sets or removes the limit on reserved bytes. Memory that is already reserved above it stays.
    pub fn set_limit(&mut self, limit: Option<Bytes>) {
        let (state, _) = self.lanes.parts_mut();
        (state.limit, state.fraction) = (limit, None);
        self.share_limit();
    }

    /// Returns the limit on reserved bytes, if there is one. A limit from the configuration applies only after the
    /// first request for new memory.
    pub fn limit(&self) -> Option<Bytes> {
        self.lanes.parts().0.limit
    }

    /// Returns the fraction of the device's memory that may be reserved; 1.0 if there is no limit.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] when the device does not report its memory size.
    pub fn memory_fraction(&mut self) -> Result<f64, AllocError> {
        let (state, _) = self.lanes.parts();
        let Some(limit) = state.limit else {
            // A configured fraction becomes a limit at the first request for new memory.
            return Ok(state.fraction.unwrap_or(1.0));
        };
        let total = self.lane_mut().memory_info()?.total;
        #[expect(clippy::cast_precision_loss, reason = "a fraction is not exact")]
        let fraction = limit.get() as f64 / total.get() as f64;
        Ok(fraction)
    }

    /// Sets the configured limit, once, by asking the device through lane `own` for its memory size.
    pub(super) fn apply_configured_fraction(&mut self, own: usize) -> Result<(), DriverError> {
        let Some(fraction) = self.lanes.parts().0.fraction else {
            return Ok(());
        };
        let limit = self.lanes.lane(own).memory_info()?.limit(fraction);
        let (state, _) = self.lanes.parts_mut();
        (state.limit, state.fraction) = (limit, None);
        Ok(())
    }

    /// Limits each lane to the part of the device's limit that the other lanes leave.
    pub(super) fn share_limit(&mut self) {
        let limited = self.limited();
        let (state, lanes) = self.lanes.parts_mut();
        for lane in lanes {
            debug_assert!(lane.heap.limited() <= limited);
            let others = limited - lane.heap.limited();
            lane.heap.limit = state.limit.map(|limit| limit.saturating_sub(others));
        }
    }

    /// Returns the bytes of all lanes that count against the limit.
    pub(super) fn limited(&self) -> Bytes {
        self.sum(|lane| lane.heap.limited())
    }
}
