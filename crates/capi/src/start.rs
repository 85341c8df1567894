//! Starts a device: its allocator is made at the first use. Exported functions do so, at their beginning.

use std::collections::BTreeMap;
use std::ffi::c_int;

use lowtide_cuda::CudaDriver;
use lowtide_shared::SharedAllocator;

use crate::devices::{self, Allocator};
use crate::error::Error;
use crate::regions::table;
use crate::tms::process;
use crate::{cuda, events, idle, publish, record, settings};

/// Returns a device's allocator, and makes it if necessary. If that failed before, it is tried again.
///
/// # Errors
///
/// If there is no driver or no such device, the driver fails, or the configuration is refused.
#[inline]
pub(crate) fn device(ordinal: c_int) -> Result<&'static Allocator, Error> {
    match devices::get(ordinal) {
        Some(allocator) => Ok(allocator),
        None => start(ordinal),
    }
}

#[cold]
fn start(ordinal: c_int) -> Result<&'static Allocator, Error> {
    // Without any lock, because it may enter a region, for which the device is then prepared.
    process::start_if_named();
    let allocator = make(ordinal)?;
    // Without any lock, because the first page of statistics is requested here.
    publish::start();
    Ok(allocator)
}

/// Makes a device's allocator. Everything that the device starts with is locked, and does not change, until the
/// device is in use.
fn make(ordinal: c_int) -> Result<&'static Allocator, Error> {
    let mut settings = settings::lock()?;
    let config = settings.config_in_job()?;
    let library = cuda::library()?;
    let number = devices::number_among(ordinal, library.device_count()?)?;
    if let Some(allocator) = devices::get(ordinal) {
        // Another thread was faster.
        return Ok(allocator);
    }
    let device = library.device(number.into())?;
    // SAFETY: 1. the driver goes into an allocator, which gives it only what it got from it. 2. Streams
    // are the callers', who promise that they exist. 3. No one resets the primary context while its
    // memory is in use, which CUDA's documentation asks of every program.
    let driver = unsafe { CudaDriver::new(device) }?;
    let allocator = SharedAllocator::new(
        driver,
        number,
        &config,
        devices::owners(),
        devices::search_hint(),
    );
    let mut listeners = events::lock()?;
    listeners.recorder = record::of_process(listeners.recorder.take());
    listeners.observe(ordinal, &allocator)?;
    let _attached = table::attach(ordinal, &allocator)?;
    // This comes last: if a device could not be made, the next attempt must not begin a second time.
    listeners.begin_recording(ordinal, &allocator, &settings.recorded()?, &BTreeMap::new())?;
    idle::start(config.name());
    Ok(devices::insert(number, allocator))
}
