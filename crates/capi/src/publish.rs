//! The figures of this process for `lowtide top`: a thread sleeps until someone of the same user asks.
//!
//! The socket is in a directory of the user's own (`crates/sockets`). Both ends ask the system who the other is. The
//! child of a fork does not keep it.

use std::io::{self, ErrorKind, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::catch_unwind;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use lowtide_cuda::SignalsBlocked;
use lowtide_sockets::{is_same_user, name_for_figures};

use crate::exposition::Reader;
use crate::switch::Switch;
use crate::{exposition, metrics, sockets};

/// Whether `lowtide top` sees this process.
static PUBLISHES: Switch = Switch::new("LOWTIDE_PUBLISH", true);

/// How long one who asks may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// Lets others see this process's figures from now on, as its environment says: `LOWTIDE_PUBLISH=0` hides them
/// from `lowtide top`, `LOWTIDE_METRICS` shows them to Prometheus. Does so once a process.
pub(crate) fn start() {
    static STARTED_IN: AtomicU32 = AtomicU32::new(0);
    let this = process::id();
    if STARTED_IN.swap(this, Ordering::Relaxed) == this {
        return;
    }
    let _signals = SignalsBlocked::begin();
    metrics::start();
    if PUBLISHES.is_on() {
        // Where there is no socket or thread for it, the process is one that `top` does not see.
        let _ = listen();
    }
}

fn listen() -> io::Result<()> {
    let listener = sockets::listen(sockets::places().own()?, &name_for_figures()?)?;
    let thread = thread::Builder::new().name("lowtide-top".to_owned());
    thread.spawn(move || serve(&listener))?;
    Ok(())
}

fn serve(listener: &UnixListener) {
    loop {
        match listener.accept() {
            Ok((stream, _)) => drop(catch_unwind(move || answer(stream))),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // The process has too many files open, say.
            Err(_) => thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn answer(mut stream: UnixStream) -> io::Result<()> {
    if !is_same_user(&stream)? {
        return Ok(());
    }
    stream.set_write_timeout(Some(PATIENCE))?;
    let text = exposition::text(&[], Reader::SameUser);
    // One who asks a process that ends, or has panicked, sees a connection with nothing in it.
    text.map_or(Ok(()), |text| stream.write_all(text.as_bytes()))
}
