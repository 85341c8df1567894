//! The exporter's thread, which sends the handles of shared mapped memory.

use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lowtide_core::DriverError;
use lowtide_cuda::call_at_exit;
use lowtide_sockets::{receive, send};

use super::ticket::Identity;
use super::wire::{PARTS_MAX, PREFIX, REQUEST_BYTES, Reply, Request, socket_name};
use crate::error::{Error, Status};
use crate::{devices, fork, sockets};

/// The time limit for an importer's request and for receiving the reply. Other importers wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    NotStarted,
    Runs,
    /// The process is ending, and soon the driver. The driver is not called any more.
    Ended,
}

/// Locked while the thread calls the driver.
static STAGE: Mutex<Stage> = Mutex::new(Stage::NotStarted);

/// Starts the thread, if it is not running.
///
/// # Errors
///
/// If the system cannot create the socket or the thread. Nothing has been started then.
pub(crate) fn start(identity: &'static Identity) -> Result<(), Error> {
    let mut stage = stage();
    if *stage != Stage::NotStarted {
        return Ok(());
    }
    let started = || -> io::Result<()> {
        let directory = sockets::places().own()?;
        directory.remove_dead(PREFIX);
        watch_process()?;
        let name = socket_name(identity.name);
        sockets::serve(directory, &name, "lowtide-share", |stream| {
            answer(stream, identity)
        })
    };
    started().map_err(|error| {
        let text = format_args!("other processes cannot be served: {error}");
        Error::new(Status::Driver, text)
    })?;
    *stage = Stage::Runs;
    Ok(())
}

fn stage() -> MutexGuard<'static, Stage> {
    // The lock guards one word, which a panic does not leave inconsistent.
    STAGE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn answer(stream: &UnixStream, identity: &Identity) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut request = [0; REQUEST_BYTES];
    // Whatever descriptors an importer sends are closed.
    drop(receive(stream, &mut request)?);
    let reply = match Request::decode(&request) {
        Some(request) if request.token == identity.token => export(&request),
        _ => Reply::Refused,
    };
    let (bytes, descriptors) = reply.encode();
    send(stream, &bytes, &descriptors)
}

fn export(request: &Request) -> Reply {
    let stage = stage();
    if *stage != Stage::Runs {
        return Reply::Gone;
    }
    let exported = devices::all().find_map(|(_, allocator)| {
        let physical = allocator.physical();
        let handles = physical.handles(&request.range, request.offset)?;
        let driver = physical.driver();
        let parts = { handles.take(PARTS_MAX) }
            .map(|(handle, size)| Ok((driver.export(handle)?, size)))
            .collect::<Result<_, DriverError>>();
        Some(parts)
    });
    match exported {
        Some(Ok(parts)) => Reply::Parts(parts),
        Some(Err(error)) => Reply::Failed(error.to_string()),
        None => Reply::Gone,
    }
}

/// Ensures that the driver is not called after the process has begun to end.
fn watch_process() -> io::Result<()> {
    extern "C" fn at_exit() {
        // In the child of a fork the lock may be held for ever.
        if !fork::is_forked() {
            *stage() = Stage::Ended;
        }
    }
    // Registered after the driver's own, so it runs before that.
    let is_watched = call_at_exit(at_exit);
    is_watched
        .then_some(())
        .ok_or(ErrorKind::OutOfMemory.into())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use lowtide_sockets::is_same_user;

    use super::*;

    /// Needs the right to become another user, as tests in a container often have.
    #[test]
    fn another_user_is_not_this_one() {
        let become_nobody = || {
            let (keep, nobody) = (-1, 65_534);
            // The system call and not the C library's function: for this thread alone.
            // SAFETY: takes numbers only.
            unsafe { libc::syscall(libc::SYS_setresuid, keep, nobody, keep) == 0 }
        };
        let (here, _there) = UnixStream::pair().unwrap();
        let found = thread::spawn(move || {
            assert!(is_same_user(&here).unwrap());
            become_nobody().then(|| is_same_user(&here).unwrap())
        });
        assert_ne!(found.join().unwrap(), Some(true));
    }
}
