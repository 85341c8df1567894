//! Publishes this process's statistics for `lowtide top`. A thread sleeps until a process of the same user
//! connects.
//!
//! The socket is in a directory of this user (`crates/sockets`). Both ends ask the system for the other's user. A
//! forked child does not keep the socket.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use lowtide_cuda::SignalsBlocked;
use lowtide_sockets::name_for_figures;

use crate::exposition::Reader;
use crate::switch::Switch;
use crate::{exposition, metrics, sockets};

/// Whether `lowtide top` sees this process.
static PUBLISHES: Switch = Switch::new("LOWTIDE_PUBLISH", true);

/// The time limit for one client.
const PATIENCE: Duration = Duration::from_secs(1);

/// Publishes this process's statistics from now on, as the environment says. `LOWTIDE_PUBLISH=0` hides them from
/// `lowtide top`, `LOWTIDE_METRICS` exports them to Prometheus. Has an effect once per process.
pub(crate) fn start() {
    static STARTED_IN: AtomicU32 = AtomicU32::new(0);
    let this = process::id();
    if STARTED_IN.swap(this, Ordering::Relaxed) == this {
        return;
    }
    let _signals = SignalsBlocked::begin();
    metrics::start();
    if PUBLISHES.is_on() {
        // If no socket or thread can be created, `lowtide top` does not see this process.
        let _ = serve();
    }
}

fn serve() -> io::Result<()> {
    let directory = sockets::places().own()?;
    sockets::serve(directory, &name_for_figures()?, "lowtide-top", answer)
}

fn answer(mut stream: &UnixStream) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let text = exposition::text(&[], Reader::SameUser);
    // If the process is ending or has panicked, the client gets an empty answer.
    text.map_or(Ok(()), |text| stream.write_all(text.as_bytes()))
}
