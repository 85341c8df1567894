//! Access to the devices' drivers for everything except requests. No other module reaches the drivers.

use std::ffi::c_int;

use lowtide_core::Physical;
use lowtide_cuda::CudaDriver;

use crate::error::Error;
use crate::{devices, start};

/// Returns the result of `act` with a device's physical memory. Starts the device if it is not in use.
///
/// # Errors
///
/// As for [`start::device`].
pub(crate) fn with_physical<R>(
    ordinal: c_int,
    act: impl FnOnce(&mut Physical<CudaDriver>) -> R,
) -> Result<R, Error> {
    Ok(act(&mut start::device(ordinal)?.physical()))
}

/// Returns the result of `act` with a device's driver. Starts the device if it is not in use.
///
/// # Errors
///
/// As for [`start::device`].
pub(crate) fn with<R>(ordinal: c_int, act: impl FnOnce(&mut CudaDriver) -> R) -> Result<R, Error> {
    Ok(act(start::device(ordinal)?.physical().driver_mut()))
}

/// Returns the first result that is not `None` of calling `ask` with the physical memory of each device in use.
pub(crate) fn find<R>(mut ask: impl FnMut(&Physical<CudaDriver>) -> Option<R>) -> Option<R> {
    devices::all().find_map(|(_, allocator)| ask(&allocator.physical()))
}
