//! Memory that other devices of the process use.

use std::ffi::c_int;

use crate::boundary::run;
use crate::drivers;
use crate::error::{Error, Status};

/// Lets work on `peer` use the memory of `device`: all that there is and all to come, of every kind. Doing
/// it again changes nothing, and a device may use its own memory anyway. Both devices are made ready for
/// use.
///
/// `LOWTIDE_STATUS_DRIVER` where the machine does not connect the two.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_enable_peer_access(device: c_int, peer: c_int) -> Status {
    run(|| enable(device, peer))
}

pub(crate) fn enable(owner: c_int, peer: c_int) -> Result<(), Error> {
    // One lock at a time: two threads may do this in both directions.
    let peer_device = drivers::with(peer, |driver| driver.device().clone())?;
    let owner_device = drivers::with(owner, |driver| driver.device().clone())?;
    if owner != peer && !peer_device.can_access(&owner_device)? {
        let text = format_args!("device {peer} cannot use the memory of device {owner}");
        return Err(Error::new(Status::Driver, text));
    }
    Ok(drivers::with(owner, |driver| {
        driver.allow_peer(&peer_device)
    })??)
}
