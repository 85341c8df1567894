//! How much memory regions have, and where.

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
    /// The blocks that the program holds in it.
    pub(crate) live: Bytes,
    /// What a resume would take of the device's memory now.
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

/// Returns how many bytes of a device's paused segments are in no block: they count as reserved and not as active, and
/// are not on the device.
///
/// # Errors
///
/// If lowtide panicked in this process.
pub(crate) fn free_bytes_away(device: c_int) -> Result<Bytes, Error> {
    let mut sum = Bytes::ZERO;
    for region in table::memories_on(device)? {
        sum += region.free_bytes_away()?;
    }
    Ok(sum)
}

/// Returns how much of what is free on a device the margin keeps, where nothing but that refused a region's request.
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
