//! The exporter's thread, which sends the handles of shared mapped memory.

use std::io::{self, ErrorKind};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::catch_unwind;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use lowtide_core::DriverError;
use lowtide_cuda::SignalsBlocked;
use lowtide_sockets::is_same_user;

use super::socket;
use super::ticket::Identity;
use super::wire::{PARTS_MAX, REQUEST_BYTES, Reply, Request};
use crate::error::{Error, Status};
use crate::{drivers, fork, sockets};

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
        directory.remove_dead(socket::PREFIX);
        let listener = sockets::listen(directory, &socket::name_of(identity.name))?;
        watch_process()?;
        let _signals = SignalsBlocked::begin();
        let thread = thread::Builder::new().name("lowtide-share".to_owned());
        thread.spawn(move || serve(&listener, identity))?;
        Ok(())
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

fn serve(listener: &UnixListener, identity: &'static Identity) {
    loop {
        match listener.accept() {
            // If serving an importer fails, even by a bug in lowtide, the importer sees the connection end.
            Ok((stream, _)) => drop(catch_unwind(move || answer(&stream, identity))),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // For example, the process has too many open files.
            Err(_) => thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn answer(stream: &UnixStream, identity: &Identity) -> io::Result<()> {
    if !is_same_user(stream)? {
        return Ok(());
    }
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut request = [0; REQUEST_BYTES];
    // Whatever descriptors an importer sends are closed.
    drop(socket::receive(stream, &mut request)?);
    let reply = match Request::decode(&request) {
        Some(request) if request.token == identity.token => export(&request),
        _ => Reply::Refused,
    };
    let (bytes, descriptors) = reply.encode();
    socket::send(stream, &bytes, &descriptors)
}

fn export(request: &Request) -> Reply {
    let stage = stage();
    if *stage != Stage::Runs {
        return Reply::Gone;
    }
    let exported = drivers::find(|physical| {
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
    static IS_WATCHED: Mutex<bool> = Mutex::new(false);
    extern "C" fn at_exit() {
        // In the child of a fork the lock may be held for ever.
        if !fork::is_forked() {
            *stage() = Stage::Ended;
        }
    }
    let mut is_watched = IS_WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
    if *is_watched {
        return Ok(());
    }
    // Registered after the driver's own, so it runs before that.
    // SAFETY: the function stays: what has a thread is not unloaded.
    if unsafe { libc::atexit(at_exit) } != 0 {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    *is_watched = true;
    Ok(())
}
