//! Numbers and names that nobody can guess.

use std::ffi::OsString;
use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

/// Returns a number that nobody can guess.
///
/// # Errors
///
/// If the system has no random bytes.
pub fn unguessable_number() -> io::Result<u128> {
    let mut random = [0; 16];
    // `getrandom` never returns fewer bytes than these 16.
    getrandom(&mut random, GetRandomFlags::empty())?;
    Ok(u128::from_ne_bytes(random))
}

/// Returns a name for a new file that nobody can guess.
pub(crate) fn unguessable_name() -> io::Result<OsString> {
    Ok(format!(".lowtide-{:032x}.tmp", unguessable_number()?).into())
}
