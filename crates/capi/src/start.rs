//! Starting a device: its allocator is made when it is first used. Only exported functions do so.

use std::collections::BTreeMap;
use std::ffi::c_int;

use lowtide_cuda::CudaDriver;
use lowtide_shared::SharedAllocator;

use crate::devices::{self, Allocator};
use crate::error::Error;
use crate::regions::table;
use crate::tms::process;
use crate::{cuda, events, publish, record, settings};

/// Returns a device's allocator, which is made if need be. What failed then is tried again the next time.
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
    // Without any lock: it may enter a region, which the device is then prepared for.
    process::start_if_named();
    let allocator = make(ordinal)?;
    // Without any lock: what is shown first is asked for here.
    publish::start();
    Ok(allocator)
}

/// Makes a device's allocator. All that it starts with is locked until it is in use, and none of it changes in between.
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
    let allocator = SharedAllocator::new(driver, number, &config, devices::owners());
    let mut listeners = events::lock()?;
    listeners.recorder = record::of_process(listeners.recorder.take());
    listeners.observe(ordinal, &allocator)?;
    let _attached = table::attach(ordinal, &allocator)?;
    // Last: a device that could not be made is tried again, and begins once.
    listeners.begin_recording(ordinal, &allocator, &settings.recorded()?, &BTreeMap::new())?;
    devices::insert(number, allocator)
}
