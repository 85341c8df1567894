//! The devices' drivers, for what is no request: the one place that reaches them.

use std::ffi::c_int;

use lowtide_cuda::CudaDriver;

use crate::error::Error;
use crate::{devices, start};

/// Returns what `act` does with the driver of a device, which is made ready for use if need be.
///
/// # Errors
///
/// As [`start::device`].
pub(crate) fn with<R>(ordinal: c_int, act: impl FnOnce(&mut CudaDriver) -> R) -> Result<R, Error> {
    Ok(start::device(ordinal)?.with_driver(act))
}

/// Returns the first answer that `ask` has for one of the devices in use.
pub(crate) fn find<R>(mut ask: impl FnMut(&mut CudaDriver) -> Option<R>) -> Option<R> {
    devices::all().find_map(|(_, allocator)| allocator.with_driver(&mut ask))
}
