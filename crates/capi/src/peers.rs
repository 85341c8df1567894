//! Access from other devices of the process.

use std::ffi::c_int;

use crate::boundary::run;
use crate::drivers;
use crate::error::{Error, Status};

/// Lets work on `peer` access the memory of `device`: all memory, now and later, of every kind. A repeated call
/// changes nothing, and a device always has access to its own memory. Both devices are started if necessary.
///
/// Returns `LOWTIDE_STATUS_DRIVER` if the machine does not connect the two devices.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_enable_peer_access(device: c_int, peer: c_int) -> Status {
    run(|| enable(device, peer))
}

pub(crate) fn enable(owner: c_int, peer: c_int) -> Result<(), Error> {
    // One lock at a time: two threads may call this for the two directions at once.
    let peer_device = drivers::with(peer, |driver| driver.device().clone())?;
    let owner_device = drivers::with(owner, |driver| driver.device().clone())?;
    if owner != peer && !peer_device.can_access(&owner_device)? {
        let text = format_args!("device {peer} cannot use the memory of device {owner}");
        return Err(Error::new(Status::Driver, text));
    }
    Ok(drivers::with_physical(owner, |physical| {
        let views = physical.views();
        let mapped: Vec<_> = views.map(|(address, view)| (address, view.size)).collect();
        physical.driver_mut().allow_peer(&peer_device, &mapped)
    })??)
}
