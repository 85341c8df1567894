//! The devices' drivers, for what is no request: the one place that reaches them through the registry.

use std::ffi::c_int;

use lowtide_cuda::CudaDriver;

use crate::error::Error;
use crate::registry;

/// Returns what `act` does with the driver of a device, which is made ready for use if need be.
///
/// # Errors
///
/// As [`registry::device`].
pub(crate) fn with<R>(ordinal: c_int, act: impl FnOnce(&mut CudaDriver) -> R) -> Result<R, Error> {
    Ok(registry::device(ordinal)?.with_driver(act))
}

/// Returns the first answer that `ask` has for one of the devices in use.
///
/// # Errors
///
/// If the process was forked.
pub(crate) fn find<R>(
    mut ask: impl FnMut(&mut CudaDriver) -> Option<R>,
) -> Result<Option<R>, Error> {
    for (_, allocator) in registry::devices_in_use()? {
        let answer = allocator.with_driver(&mut ask);
        if answer.is_some() {
            return Ok(answer);
        }
    }
    Ok(None)
}
