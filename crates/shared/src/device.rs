//! What concerns all of a device: figures, pictures, limits, pools, giving memory back.

use std::sync::atomic::Ordering;

use lowtide_core::{
    AllocError, Bytes, CheckLevel, Config, DeviceAllocator, Driver, Event, KeptPool, Lanes,
    MempoolId, SegmentSnapshot, Stats, limit_of_fraction,
};

use crate::lane::{Common, ROUTED};
use crate::{SharedAllocator, SharedDriver, SharedError};

/// What a device holds, and what led there.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct DevicePast {
    /// What is held, by address.
    pub segments: Vec<SegmentSnapshot>,
    /// The last events, oldest first: some thousands of each lane, as far back as they are known of every lane, and
    /// none before little of the device was left. Those of several lanes take turns in dozens, but for what concerns
    /// the driver, which is in order. That a pool's memory left, or is back, is one event without an address.
    pub events: Vec<Event>,
    /// The pools whose memory is away.
    pub paused: Vec<MempoolId>,
    /// The private pools that keep what is free in them.
    pub kept: Vec<KeptPool>,
}

impl DevicePast {
    /// Returns this without the pools whose memory is away, as if it had never been on the device.
    #[must_use]
    pub fn on_device(mut self) -> DevicePast {
        let is_there = |pool: &MempoolId| !self.paused.contains(pool);
        self.segments.retain(|segment| is_there(&segment.pool));
        self.events
            .retain(|event| is_there(&event.pool) && !event.action.is_pause());
        self
    }
}

impl<D: Driver> SharedAllocator<D> {
    /// Returns the figures, those of all lanes at one moment.
    ///
    /// # Errors
    ///
    /// [`SharedError::Poisoned`].
    pub fn stats(&self) -> Result<Stats, SharedError> {
        self.with_all(|lanes| lanes.stats())
    }

    /// Returns every figure as [`DeviceAllocator::memory_stats`] does.
    ///
    /// # Errors
    ///
    /// [`SharedError::Poisoned`].
    pub fn memory_stats(&self) -> Result<Vec<(String, i64)>, SharedError> {
        self.with_all(|lanes| lanes.memory_stats())
    }

    /// Sets every peak to its current value.
    ///
    /// # Errors
    ///
    /// [`SharedError::Poisoned`].
    pub fn reset_peak_stats(&self) -> Result<(), SharedError> {
        self.with_all(|lanes| lanes.reset_peak_stats())
    }

    /// Sets every sum and count to zero.
    ///
    /// # Errors
    ///
    /// [`SharedError::Poisoned`].
    pub fn reset_accumulated_stats(&self) -> Result<(), SharedError> {
        self.with_all(|lanes| lanes.reset_accumulated_stats())
    }

    /// Returns everything held, as [`DeviceAllocator::snapshot`] does.
    ///
    /// # Errors
    ///
    /// [`SharedError::Poisoned`].
    pub fn snapshot(&self) -> Result<Vec<SegmentSnapshot>, SharedError> {
        self.with_all(|lanes| lanes.snapshot())
    }

    /// Returns what is held and the last events that led there.
    ///
    /// # Errors
    ///
    /// [`SharedError::Poisoned`].
    pub fn recent_past(&self) -> Result<DevicePast, SharedError> {
        self.with_all(|lanes| DevicePast {
            segments: lanes.segments(),
            events: lanes.recent_events(),
            // Private pools are all in the first lane.
            paused: lanes.lane(0).paused_pools(),
            kept: lanes.lane(0).kept_pools(),
        })
    }

    /// Gives everything that is not in use back, as [`DeviceAllocator::empty_cache`] does.
    ///
    /// # Errors
    ///
    /// As [`DeviceAllocator::empty_cache`], and [`SharedError::Poisoned`].
    pub fn empty_cache(&self) -> Result<(), SharedError> {
        Ok(self.with_all(|lanes| lanes.empty_cache())??)
    }

    /// Gives what a private pool holds free back, as [`DeviceAllocator::empty_pool`] does.
    ///
    /// # Errors
    ///
    /// As [`DeviceAllocator::empty_pool`], and [`SharedError::Poisoned`].
    pub fn empty_pool(&self, pool: MempoolId) -> Result<(), SharedError> {
        // All lanes, though one holds pools: who gets the same memory next tells of that later.
        Ok(self.with_all(|lanes| lanes.lane(0).empty_pool(pool))??)
    }

    /// Takes over other options of `caching` while the device is in use, as
    /// [`DeviceAllocator::reconfigure`] does. The number of lanes stays what it is: with several, garbage
    /// collection weighs the segments of each lane by themselves.
    ///
    /// # Errors
    ///
    /// As [`DeviceAllocator::reconfigure`], and [`SharedError::Poisoned`].
    pub fn reconfigure(&self, config: &Config) -> Result<(), SharedError> {
        self.try_each_lane(|lane| lane.reconfigure(config))
    }

    /// Returns the part of the device's memory that may be held from the driver: 1.0 where there is no
    /// limit.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] when the device does not say how much memory it has, and
    /// [`SharedError::Poisoned`].
    pub fn memory_fraction(&self) -> Result<f64, SharedError> {
        let common = self.common.lock()?;
        let Some(limit) = common.limit else {
            // What is configured becomes a limit at the first request for new memory.
            return Ok(common.fraction.unwrap_or(1.0));
        };
        let info = self.with_driver(Driver::memory_info);
        let total = info.map_err(AllocError::from)?.total;
        #[expect(clippy::cast_precision_loss, reason = "a fraction is not exact")]
        let fraction = limit.get() as f64 / total.get() as f64;
        Ok(fraction)
    }

    /// Returns the most bytes that may be held from the driver, where there is a limit: none before the
    /// first request for new memory, even where the configuration asks for one.
    ///
    /// # Errors
    ///
    /// [`SharedError::Poisoned`].
    pub fn limit(&self) -> Result<Option<Bytes>, SharedError> {
        Ok(self.common.lock()?.limit)
    }

    /// Sets or removes the most bytes that may be held from the driver. What is held above it stays.
    ///
    /// # Errors
    ///
    /// [`SharedError::Poisoned`].
    pub fn set_limit(&self, limit: Option<Bytes>) -> Result<(), SharedError> {
        let mut common = self.common.lock()?;
        (common.limit, common.fraction) = (limit, None);
        let mut visits = self.enter_all()?;
        common.lanes(&mut visits).share_limit();
        Ok(())
    }

    /// Limits what may be held from the driver to a part of the device's memory, from 0 to 1, which removes
    /// the limit.
    ///
    /// # Errors
    ///
    /// [`AllocError::NotAFraction`] for what is not from 0 to 1, [`AllocError::Driver`] when the device does
    /// not say how much memory it has, and [`SharedError::Poisoned`].
    pub fn set_memory_fraction(&self, fraction: f64) -> Result<(), SharedError> {
        let info = self.with_driver(Driver::memory_info);
        let total = info.map_err(AllocError::from)?.total;
        self.set_limit(limit_of_fraction(fraction, total)?)
    }

    /// Returns what `act` does with the lane that private pools are in. Any of its calls that concern
    /// pools and routes may be made, but [`SharedAllocator::empty_pool`]'s.
    ///
    /// # Errors
    ///
    /// [`SharedError::Poisoned`]; `act` is then not called.
    pub fn with_pools<R>(
        &self,
        act: impl FnOnce(&mut DeviceAllocator<SharedDriver<D>>) -> R,
    ) -> Result<R, SharedError> {
        self.with_lane(0, |lane| {
            let result = act(lane);
            // Whoever sees it afterwards asks the lane, whose lock we have.
            if lane.has_routes() {
                self.flags.fetch_or(ROUTED, Ordering::Release);
            } else {
                self.flags.fetch_and(!ROUTED, Ordering::Release);
            }
            Ok(result)
        })
    }

    /// Says that a stream is being captured into a graph, as [`DeviceAllocator::capture_begin`] does.
    ///
    /// # Errors
    ///
    /// [`SharedError::Poisoned`].
    pub fn capture_begin(&self) -> Result<(), SharedError> {
        self.for_each_lane(DeviceAllocator::capture_begin)
    }

    /// Says that a capture has ended, as [`DeviceAllocator::capture_end`] does.
    ///
    /// # Errors
    ///
    /// As [`DeviceAllocator::capture_end`], and [`SharedError::Poisoned`].
    pub fn capture_end(&self) -> Result<(), SharedError> {
        self.try_each_lane(DeviceAllocator::capture_end)
    }

    /// Makes blocks free that other streams are done with, as [`DeviceAllocator::process_events`] does.
    ///
    /// # Errors
    ///
    /// As [`DeviceAllocator::process_events`], and [`SharedError::Poisoned`].
    pub fn process_events(&self) -> Result<(), SharedError> {
        self.try_each_lane(DeviceAllocator::process_events)
    }

    /// Does to every lane what may fail; returns the first error.
    fn try_each_lane(
        &self,
        mut act: impl FnMut(&mut DeviceAllocator<SharedDriver<D>>) -> Result<(), AllocError>,
    ) -> Result<(), SharedError> {
        let mut result = Ok(());
        self.for_each_lane(|lane| {
            let answer = act(lane);
            result = std::mem::replace(&mut result, Ok(())).and(answer);
        })?;
        Ok(result?)
    }

    /// Changes a setting of every lane, those that no stream was given to included, one after the other.
    ///
    /// # Errors
    ///
    /// [`SharedError::Poisoned`].
    pub fn for_each_lane(
        &self,
        mut act: impl FnMut(&mut DeviceAllocator<SharedDriver<D>>),
    ) -> Result<(), SharedError> {
        for (lane, _) in (0..).zip(&self.lanes) {
            self.with_lane(lane, |lane| {
                act(lane);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Returns what `act` does with all lanes in use while no other thread can be in any.
    ///
    /// # Errors
    ///
    /// [`SharedError::Poisoned`]; `act` is then not called.
    pub fn with_all<R>(
        &self,
        act: impl FnOnce(&mut Lanes<'_, SharedDriver<D>>) -> R,
    ) -> Result<R, SharedError> {
        let mut common = self.common.lock()?;
        let mut visits = self.enter_all()?;
        let mut lanes = common.lanes(&mut visits);
        let result = act(&mut lanes);
        lanes.sync_peaks();
        for visit in &mut visits {
            self.notify(visit);
        }
        let someone_waits = visits[0].state.waiting > 0;
        drop(visits);
        if someone_waits {
            self.notify_freed()?;
        }
        Ok(result)
    }

    /// Returns what `act` does with the driver while no lane can use it.
    pub fn with_driver<R>(&self, act: impl FnOnce(&mut D) -> R) -> R {
        act(&mut SharedDriver::lock_driver(&self.driver))
    }

    /// Checks each lane as [`DeviceAllocator::check_invariants`] does.
    ///
    /// # Errors
    ///
    /// A sentence that says what is wrong, and in which lane.
    pub fn check_invariants(&self, level: CheckLevel) -> Result<(), String> {
        for index in 0..self.lanes.len() {
            let visit = self.enter(index).map_err(|error| error.to_string())?;
            let checked = visit.state.allocator.check_invariants(level);
            checked.map_err(|error| format!("lane {index}: {error}"))?;
        }
        Ok(())
    }

    /// Sets the limit that the configuration asks for, once: only the device knows how much that is.
    pub(crate) fn apply_configured_fraction(&self, common: &mut Common) -> Result<(), AllocError> {
        if let Some(fraction) = common.fraction {
            let total = self.with_driver(Driver::memory_info)?.total;
            (common.limit, common.fraction) = (Some(total.scale(fraction)), None);
        }
        Ok(())
    }
}
