//! The figures of this process for `lowtide top`: a thread sleeps until someone of the same user asks.
//!
//! The socket is in no directory, so that it needs no permission and goes with the process, however that ends.
//! Both ends ask the system who the other is. The child of a fork does not keep it.

use std::io::{self, ErrorKind, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::panic::catch_unwind;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use lowtide_cuda::SignalsBlocked;

use crate::exposition::Reader;
use crate::share::is_same_user;
use crate::switch::Switch;
use crate::threads::ParentsOnly;
use crate::{exposition, metrics};

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
    let listener = ParentsOnly::new(bind()?)?;
    let thread = thread::Builder::new().name("lowtide-top".to_owned());
    thread.spawn(move || serve(&listener))?;
    Ok(())
}

/// Returns a socket whose name says the process. A process of another container may have the same number.
fn bind() -> io::Result<UnixListener> {
    let name = |index| match index {
        0 => format!("lowtide-top-{}", process::id()),
        _ => format!("lowtide-top-{}-{index}", process::id()),
    };
    let mut outcome = Err(ErrorKind::AddrInUse.into());
    for index in 0..16 {
        outcome = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name(index))?);
        if !matches!(&outcome, Err(error) if error.kind() == ErrorKind::AddrInUse) {
            break;
        }
    }
    outcome
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
