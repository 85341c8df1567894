//! The figures of regions.

use std::ffi::c_int;
use std::sync::Arc;

use lowtide_core::{Bytes, OutOfMemory};
use lowtide_region::{BackupKind, RegionFigures};

use super::table::{self, Memory};
use crate::error::Error;

/// A region's figures on one device.
#[derive(Debug)]
pub(crate) struct OnDeviceFigures {
    pub(crate) tag: Arc<str>,
    pub(crate) kind: Option<BackupKind>,
    pub(crate) device: c_int,
    /// The bytes of its allocated blocks.
    pub(crate) live: Bytes,
    /// The bytes of the device that a resume would take now.
    pub(crate) needed_to_resume: Bytes,
    pub(crate) memory: RegionFigures,
}

/// Returns the figures of every region on every device in use, in the order in which the regions were first entered.
///
/// # Errors
///
/// If lowtide panicked in this process.
pub(crate) fn all() -> Result<Vec<OnDeviceFigures>, Error> {
    table::memories()?.iter().map(|region| of(region)).collect()
}

/// Returns the figures of a region on a device.
pub(super) fn of(region: &Memory) -> Result<OnDeviceFigures, Error> {
    Ok(OnDeviceFigures {
        tag: Arc::clone(region.tag()),
        kind: region.kind(),
        device: region.device().ordinal,
        live: region.live_bytes()?,
        needed_to_resume: region.needed_to_resume()?,
        memory: region.figures()?,
    })
}

/// Returns the free bytes in a device's paused segments. They count as reserved and not as active, and are not on the
/// device.
///
/// # Errors
///
/// If lowtide panicked in this process.
pub(crate) fn paused_free_bytes(device: c_int) -> Result<Bytes, Error> {
    let mut sum = Bytes::ZERO;
    for region in table::memories_on(device)? {
        sum += region.paused_free_bytes()?;
    }
    Ok(sum)
}

/// Returns how many of a device's free bytes the margin keeps, if the margin alone made a region refuse a request.
///
/// # Errors
///
/// If lowtide panicked in this process.
pub(crate) fn kept_by_margin(figures: &OutOfMemory) -> Result<Option<Bytes>, Error> {
    let Ok(device) = c_int::try_from(figures.device) else {
        return Ok(None);
    };
    let region = table::memory_of(device, figures.pool)?;
    Ok(region.and_then(|region| region.kept_by_margin(figures)))
}
