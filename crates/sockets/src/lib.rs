//! Sockets through which the processes of one user on one machine find each other.
//!
//! The sockets are in directories that no other user can enter ([`Places`]), so no other user can take a name or
//! fill a queue. Both ends still check the user of the other ([`is_same_user`]). Connecting never waits
//! ([`Directory::connect`]).
#![forbid(unsafe_code)]

mod directory;
mod message;
mod name;
mod places;

use std::io;
use std::os::unix::net::UnixStream;

use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;

pub use directory::{Directory, Entry};
pub use message::{DESCRIPTORS_MAX, receive, send};
pub use name::{name_for_figures, process_of};
pub use places::Places;

/// Returns whether the process at the other end runs as this process's user.
///
/// # Errors
///
/// The system's error.
pub fn is_same_user(stream: &UnixStream) -> io::Result<bool> {
    Ok(socket_peercred(stream)?.uid == geteuid())
}
