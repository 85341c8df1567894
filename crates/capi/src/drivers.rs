//! The devices' drivers, for what is no request: the one place that reaches them through the registry.

use std::ffi::c_int;

use lowtide_core::{Bytes, DeviceAddress};
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

/// Returns the device that holds a block, and the block's size.
///
/// # Errors
///
/// If the process was forked, or no device holds such a block.
pub(crate) fn block_at(address: DeviceAddress) -> Result<(c_int, Bytes), Error> {
    let (ordinal, block) = registry::find_allocation(address)?;
    Ok((ordinal, block.size))
}
