//! The importer's side: requests to the process that shared.

use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use lowtide_core::Bytes;
use lowtide_sockets::{receive, send};

use super::ticket::Mapped;
use super::wire::{REPLY_BYTES, Reply, Request, socket_name};
use crate::error::{Error, Status};
use crate::sockets;

/// The time limit for the other process, which may wait for its device's work before it answers.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the next handles from `offset` on, as descriptors with their sizes: at least one, and at most the rest
/// of the range.
///
/// # Errors
///
/// If the process has ended, has another user or does not answer, or if the memory is gone.
pub(crate) fn fetch(
    exporter: [u8; 16],
    mapped: &Mapped,
    offset: Bytes,
) -> Result<Vec<(OwnedFd, Bytes)>, Error> {
    let process = mapped.process;
    let gone = |text: &str| {
        let text = format_args!("process {process}, which shared this memory, {text}");
        Error::new(Status::InvalidArgument, text)
    };
    let reply = ask(exporter, mapped, offset).map_err(|error| match error.kind() {
        ErrorKind::NotFound
        | ErrorKind::ConnectionRefused
        | ErrorKind::UnexpectedEof
        | ErrorKind::ConnectionReset => gone("has ended, or cannot be reached from this one"),
        ErrorKind::PermissionDenied => gone("has another user"),
        ErrorKind::WouldBlock | ErrorKind::TimedOut => gone("does not answer"),
        _ => {
            let text = format_args!("process {process} cannot be asked for its memory: {error}");
            Error::new(Status::Driver, text)
        }
    })?;
    match reply {
        Some(Reply::Parts(parts)) => Ok(parts),
        Some(Reply::Refused) => Err(gone("did not make these bytes")),
        Some(Reply::Gone) => Err(gone("has given it back since")),
        Some(Reply::Failed(text)) => {
            let text = format_args!("process {process} could not share its memory: {text}");
            Err(Error::new(Status::Driver, text))
        }
        None => Err(gone("has another version of lowtide")),
    }
}

/// Returns the other process's reply; `None` if it is invalid.
fn ask(exporter: [u8; 16], mapped: &Mapped, offset: Bytes) -> io::Result<Option<Reply>> {
    let stream = connect(&socket_name(exporter))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let request = Request {
        token: mapped.token,
        range: mapped.range,
        offset,
    };
    send(&stream, &request.encode(), &[])?;
    let mut bytes = [0; REPLY_BYTES];
    let descriptors = receive(&stream, &mut bytes)?;
    let left = mapped.range.size.get().saturating_sub(offset.get());
    Ok(Reply::decode(&bytes, descriptors, Bytes(left)))
}

/// Returns a connection to a process of this user. If that process is busy, tries again for a while.
///
/// # Errors
///
/// `WouldBlock` if it stays busy, `NotFound` if there is no such socket, and the system's errors.
fn connect(name: &str) -> io::Result<UnixStream> {
    const PAUSE: Duration = Duration::from_millis(10);
    let start = Instant::now();
    loop {
        match connect_at_once(name) {
            Err(error) if error.kind() == ErrorKind::WouldBlock && start.elapsed() < PATIENCE => {
                thread::sleep(PAUSE);
            }
            Ok(stream) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            outcome => return outcome,
        }
    }
}

fn connect_at_once(name: &str) -> io::Result<UnixStream> {
    let directories = sockets::places().all();
    let mut outcomes = directories
        .iter()
        .map(|directory| directory.connect(name.as_ref()));
    let is_there = |outcome: &io::Result<UnixStream>| !matches!(outcome, Err(error) if error.kind() == ErrorKind::NotFound);
    outcomes
        .find(is_there)
        .unwrap_or_else(|| Err(ErrorKind::NotFound.into()))
}
