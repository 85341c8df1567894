//! Access from other devices of the process.

use std::ffi::c_int;

use crate::boundary::run;
use crate::devices::Allocator;
use crate::error::{Error, Status};
use crate::start;

/// Lets work on `peer` access the memory of `device`: all memory, now and later, of every kind. A repeated call
/// changes nothing, and a device always has access to its own memory. Both devices are started if necessary.
///
/// Returns `LOWTIDE_STATUS_DRIVER` if the machine does not connect the two devices.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_enable_peer_access(device: c_int, peer: c_int) -> Status {
    run(|| {
        let peer = start::device(peer)?;
        enable(start::device(device)?, peer)
    })
}

pub(crate) fn enable(owner: &Allocator, peer: &Allocator) -> Result<(), Error> {
    // One lock at a time: two threads may call this for the two directions at once.
    let [owner_device, peer_device] =
        [owner, peer].map(|allocator| allocator.physical().driver().device().clone());
    let (from, to) = (peer_device.ordinal(), owner_device.ordinal());
    if from != to && !peer_device.can_access(&owner_device)? {
        let text = format_args!("device {from} cannot use the memory of device {to}");
        return Err(Error::new(Status::Driver, text));
    }
    let mut physical = owner.physical();
    let views = physical.views();
    let mapped: Vec<_> = views.map(|(address, view)| (address, view.size)).collect();
    Ok(physical.driver_mut().allow_peer(&peer_device, &mapped)?)
}
