//! How much a device may hold from the driver.

use super::{Device, Lanes};
use crate::driver::{Driver, DriverError};
use crate::error::AllocError;
use crate::units::Bytes;

impl<L: Lanes> Device<L> {
    /// Sets or removes the most bytes that may be held from the driver. What is held above it stays.
    pub fn set_limit(&mut self, limit: Option<Bytes>) {
        let (state, _) = self.lanes.parts_mut();
        (state.limit, state.fraction) = (limit, None);
        self.share_limit();
    }

    /// Returns the most bytes that may be held from the driver, where there is a limit: none before the first
    /// request for new memory, even where the configuration asks for one.
    pub fn limit(&self) -> Option<Bytes> {
        self.lanes.parts().0.limit
    }

    /// Limits what may be held from the driver to a part of the device's memory, from 0 to 1. As in PyTorch
    /// 2.10 and newer, 1 removes the limit.
    ///
    /// # Errors
    ///
    /// [`AllocError::NotAFraction`] for what is not from 0 to 1, such as NaN, which changes nothing;
    /// [`AllocError::Driver`] when the device does not say how much memory it has.
    pub fn set_memory_fraction(&mut self, fraction: f64) -> Result<(), AllocError> {
        let total = self.total()?;
        if !(0.0..=1.0).contains(&fraction) {
            return Err(AllocError::NotAFraction);
        }
        self.set_limit((fraction < 1.0).then(|| total.scale(fraction)));
        Ok(())
    }

    /// Returns the part of the device's memory that may be held from the driver: 1.0 where there is no
    /// limit.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] when the device does not say how much memory it has.
    pub fn memory_fraction(&mut self) -> Result<f64, AllocError> {
        let (state, _) = self.lanes.parts();
        let Some(limit) = state.limit else {
            // What is configured becomes a limit at the first request for new memory.
            return Ok(state.fraction.unwrap_or(1.0));
        };
        let total = self.total()?;
        #[expect(clippy::cast_precision_loss, reason = "a fraction is not exact")]
        let fraction = limit.get() as f64 / total.get() as f64;
        Ok(fraction)
    }

    /// Sets the limit that the configuration asks for, once: only the device knows how much that is. Lane `own` asks.
    pub(super) fn apply_configured_fraction(&mut self, own: usize) -> Result<(), DriverError> {
        let Some(fraction) = self.lanes.parts().0.fraction else {
            return Ok(());
        };
        let total = self.lanes.lane(own).physical.driver.memory_info()?.total;
        let (state, _) = self.lanes.parts_mut();
        (state.limit, state.fraction) = (Some(total.scale(fraction)), None);
        Ok(())
    }

    /// Allows each lane to hold from the driver what the others leave of the device's limit.
    pub(super) fn share_limit(&mut self) {
        let limited = self.limited();
        let (state, lanes) = self.lanes.parts_mut();
        for lane in lanes {
            debug_assert!(lane.heap.limited() <= limited);
            let others = limited - lane.heap.limited();
            lane.heap.limit = state.limit.map(|limit| limit.saturating_sub(others));
        }
    }

    /// Returns the bytes of all lanes that the limit counts.
    pub(super) fn limited(&self) -> Bytes {
        self.sum(|lane| lane.heap.limited())
    }

    fn total(&mut self) -> Result<Bytes, DriverError> {
        Ok(self.lane_mut().physical.driver.memory_info()?.total)
    }
}
