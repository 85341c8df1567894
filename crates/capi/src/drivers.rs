//! Access to the devices' drivers for everything except requests. No other module reaches the drivers.

use std::ffi::c_int;

use lowtide_cuda::CudaDriver;

use crate::error::Error;
use crate::{devices, start};

/// Returns the result of `act` with a device's driver. Starts the device if it is not in use.
///
/// # Errors
///
/// As for [`start::device`].
pub(crate) fn with<R>(ordinal: c_int, act: impl FnOnce(&mut CudaDriver) -> R) -> Result<R, Error> {
    Ok(start::device(ordinal)?.with_driver(act))
}

/// Returns the first result that is not `None` of calling `ask` for the devices in use.
pub(crate) fn find<R>(mut ask: impl FnMut(&mut CudaDriver) -> Option<R>) -> Option<R> {
    devices::all().find_map(|(_, allocator)| allocator.with_driver(&mut ask))
}
