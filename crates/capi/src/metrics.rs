//! The figures of this process for Prometheus: over HTTP, or in a file for node_exporter.
//!
//! `LOWTIDE_METRICS` is a port, an address with a port, or a path that ends in `.prom`. A port alone is one of this
//! machine only. The processes of a job have it alike in their environment: where there are several ranks
//! on a machine (`LOCAL_RANK`), the port is higher by the rank, and the file's name has it. A further process with
//! the same file has one of its own, with its number in the name; one with the same port has none, and is told.

mod http;

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use lowtide_files::{NewFile, Readers};
use lowtide_trace::file_names;

use crate::boundary;
use crate::error::{Error, Status};
use crate::exposition::Reader;
use crate::threads::ParentsOnly;
use crate::{environment, exposition};

/// How often the file is written.
const FILE_EVERY: Duration = Duration::from_secs(5);

/// Where figures go.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Target {
    Address(SocketAddr),
    File(PathBuf),
}

/// Shows the figures from now on where `LOWTIDE_METRICS` says. What is wrong with that is said once, and the
/// program goes on.
pub(crate) fn start() {
    let Some(path) = environment::path_variable("LOWTIDE_METRICS") else {
        return;
    };
    let _ = boundary::run_and_tell(|| {
        let rank = environment::variable("LOCAL_RANK").and_then(|rank| rank.trim().parse().ok());
        let started = Target::parse(&path, rank).and_then(|target| match target {
            Target::Address(address) => {
                listen(address).map_err(|error| listen_text(address, &error))
            }
            Target::File(path) => write_repeatedly(&path).map_err(|error| error.to_string()),
        });
        started.map_err(|why| {
            let text = format_args!(
                "no metrics: LOWTIDE_METRICS={}: {why}",
                environment::shown(&path)
            );
            Error::new(Status::Config, text)
        })
    });
}

impl Target {
    /// Returns what the variable says, for one of several ranks of a machine.
    fn parse(path: &Path, local_rank: Option<u16>) -> Result<Target, String> {
        if path
            .extension()
            .is_some_and(|extension| extension == "prom")
        {
            let marked = local_rank.map(|rank| path.with_extension(format!("rank{rank}.prom")));
            return Ok(Target::File(marked.unwrap_or_else(|| path.to_owned())));
        }
        let text = path.to_str().unwrap_or_default();
        let local = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let address = text.parse::<u16>().map(local).ok();
        let address = address.or_else(|| text.parse::<SocketAddr>().ok());
        let mut address = address.ok_or_else(|| {
            "expected a port, an address with a port like 0.0.0.0:9400, or a path that ends in .prom"
                .to_owned()
        })?;
        if address.port() == 0 {
            return Err(
                "port 0 would be any, which nobody is told: name one from 1 to 65535".to_owned(),
            );
        }
        let port = address.port().checked_add(local_rank.unwrap_or(0));
        address.set_port(port.ok_or("the port and the rank are together more than 65535")?);
        Ok(Target::Address(address))
    }
}

fn listen(address: SocketAddr) -> io::Result<()> {
    let listener = ParentsOnly::new(TcpListener::bind(address)?)?;
    let thread = thread::Builder::new().name("lowtide-metrics".to_owned());
    thread.spawn(move || http::serve(&listener, || exposition::text(&[], Reader::Anyone)))?;
    Ok(())
}

/// Returns why nothing is served at `address`, and what to do where another process is.
fn listen_text(address: SocketAddr, error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::AddrInUse => format!(
            "another process has {address}; choose another port, or a path that ends in .prom, of which each process \
             has a file of its own"
        ),
        _ => error.to_string(),
    }
}

/// Writes a file now, so that what is wrong with it is said at once, and again and again. It goes when the
/// process ends, but not when it is killed; node_exporter says how old it is.
fn write_repeatedly(path: &Path) -> io::Result<()> {
    sweep(path);
    let (path, claim) = own_file(path)?;
    let started = write_file(&path);
    started.inspect_err(|_| drop(lowtide_files::remove(&lock_of(&path))))?;
    remove_at_exit(path.clone(), claim);
    let thread = thread::Builder::new().name("lowtide-metrics".to_owned());
    thread.spawn(move || {
        loop {
            thread::sleep(FILE_EVERY);
            // A disk that is full may have room later, and whoever reads the file sees that it is old.
            let _ = write_file(&path);
        }
    })?;
    Ok(())
}

/// Removes what killed processes have left: files of this name to which nobody writes. `path` itself is replaced.
fn sweep(path: &Path) {
    // One that cannot be removed is no reason to show no figures.
    for left in file_names::named_as(path).unwrap_or_default() {
        let lock = lock_of(&left);
        // While it is claimed no process begins to write there.
        if left != path
            && lock.exists()
            && let Ok(Some(_claim)) = claim(&left)
        {
            let _ = lowtide_files::remove(&left);
            let _ = lowtide_files::remove(&lock);
        }
    }
}

/// Returns where this process writes: to `path`, which a killed process may have left, or to a file with this process's
/// number in its name where another writes to that. It is this process's until the claim to it is closed.
fn own_file(path: &Path) -> io::Result<(PathBuf, ParentsOnly<File>)> {
    if let Some(claim) = claim(path)? {
        return Ok((path.to_owned(), claim));
    }
    // The number is another process's in another container.
    for earlier in 0.. {
        let path = file_names::of_process(path, std::process::id(), earlier);
        if let Some(claim) = claim(&path)? {
            return Ok((path, claim));
        }
    }
    Err(ErrorKind::AlreadyExists.into())
}

/// Returns a claim to write to `path`; `None` where another process has it. The file itself is another one after each
/// writing, so what is locked is one beside it, which ends in no `.prom`: nobody takes it for figures.
fn claim(path: &Path) -> io::Result<Option<ParentsOnly<File>>> {
    let lock = lock_of(path);
    loop {
        let file = match lowtide_files::open_lock(&lock) {
            Err(error) if lock.symlink_metadata().is_ok() => match error.kind() {
                // Another user's process has it, or has left it.
                ErrorKind::PermissionDenied => return Ok(None),
                kind => {
                    let text = format!("{}: {error}", environment::shown(&lock));
                    return Err(io::Error::new(kind, text));
                }
            },
            opened => opened?,
        };
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(None),
            // Where there are no locks, the last to write is read.
            Err(TryLockError::Error(_)) => return Ok(Some(ParentsOnly::new(file)?)),
            Ok(()) => {}
        }
        // Who had it may have ended and removed it between the two.
        let number = file.metadata()?.ino();
        if fs::symlink_metadata(&lock).is_ok_and(|there| there.ino() == number) {
            return Ok(Some(ParentsOnly::new(file)?));
        }
    }
}

fn lock_of(path: &Path) -> PathBuf {
    let mut lock = path.to_owned().into_os_string();
    lock.push(".lock");
    lock.into()
}

/// Writes the file in one piece for whoever reads it. Its lines name the process, as those of several processes
/// come together.
fn write_file(path: &Path) -> io::Result<()> {
    let process = std::process::id().to_string();
    let text = exposition::text(&[("pid", process)], Reader::Anyone);
    let text = text.map_err(|error| io::Error::other(error.text))?;
    let new = NewFile::create(path, Readers::Umask)?;
    new.file().write_all(text.as_bytes())?;
    new.rename().map(drop)
}

fn remove_at_exit(path: PathBuf, claim: ParentsOnly<File>) {
    static FILE: Mutex<Option<(u32, PathBuf, ParentsOnly<File>)>> = Mutex::new(None);
    extern "C" fn at_exit() {
        let Ok(file) = FILE.lock() else { return };
        // In the child of a fork it is its parent's.
        if let Some((_, path, _)) = file
            .as_ref()
            .filter(|(process, ..)| *process == std::process::id())
        {
            let _ = lowtide_files::remove(path);
            let _ = lowtide_files::remove(&lock_of(path));
        }
    }
    if let Ok(mut file) = FILE.lock() {
        *file = Some((std::process::id(), path, claim));
    }
    // SAFETY: the function stays: what has a thread is not unloaded.
    let _ = unsafe { libc::atexit(at_exit) };
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::io::{Read as _, Write as _};
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    fn check(text: &str, rank: Option<u16>, expected: &str) {
        let found = match Target::parse(text.as_ref(), rank) {
            Ok(Target::Address(address)) => address.to_string(),
            Ok(Target::File(path)) => path.display().to_string(),
            Err(why) => why,
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn a_port_alone_is_of_this_machine_only() {
        check("9400", None, "127.0.0.1:9400");
        check("9400", Some(3), "127.0.0.1:9403");
        check("0.0.0.0:9400", None, "0.0.0.0:9400");
        check("[::1]:80", Some(1), "[::1]:81");
        check("/var/lib/a/job.prom", None, "/var/lib/a/job.prom");
        check("/var/lib/a/job.prom", Some(2), "/var/lib/a/job.rank2.prom");
        let expected = "expected a port, an address with a port like 0.0.0.0:9400, or a path that ends in .prom";
        for wrong in ["", "x", "70000", "localhost", "/var/lib/a"] {
            check(wrong, None, expected);
        }
        let any = "port 0 would be any, which nobody is told: name one from 1 to 65535";
        for rank in [None, Some(1)] {
            check("0", rank, any);
            check("0.0.0.0:0", rank, any);
        }
        check(
            "65535",
            Some(1),
            "the port and the rank are together more than 65535",
        );
    }

    #[test]
    fn a_path_may_be_any_bytes() {
        let path = Path::new(OsStr::from_bytes(b"/run/any\xffname.prom"));
        assert_eq!(Target::parse(path, None), Ok(Target::File(path.to_owned())));
        let ranked = Path::new(OsStr::from_bytes(b"/run/any\xffname.rank1.prom"));
        assert_eq!(
            Target::parse(path, Some(1)),
            Ok(Target::File(ranked.to_owned()))
        );
        let neither = Path::new(OsStr::from_bytes(b"80\xff"));
        assert!(Target::parse(neither, None).is_err());
    }

    #[test]
    fn each_process_has_a_file_of_its_own() {
        let process = std::process::id();
        let directory = std::env::temp_dir().join(format!("lowtide-metrics-{process}"));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("job.prom");
        // What a killed process has left is replaced.
        fs::write(&path, "old").unwrap();
        fs::write(lock_of(&path), "").unwrap();
        let (first, claim) = own_file(&path).unwrap();
        assert_eq!(first, path);
        let (second, _claim) = own_file(&path).unwrap();
        assert_eq!(second, directory.join(format!("job.pid{process}.prom")));
        let (third, _claim) = own_file(&path).unwrap();
        assert_eq!(third, directory.join(format!("job.pid{process}-1.prom")));
        // The child of a fork, as a job's loaders of data are, may live on after the job.
        let (mut until_ready, mut ready) = io::pipe().unwrap();
        // SAFETY: the child does nothing but write a byte and wait until it is killed.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let _ = ready.write(&[0]);
            loop {
                // SAFETY: waits for a signal.
                unsafe { libc::pause() };
            }
        }
        until_ready.read_exact(&mut [0]).unwrap();
        drop(claim);
        let last = own_file(&path);
        let mut status = 0;
        // SAFETY: the child is this process's own.
        unsafe { libc::kill(child, libc::SIGKILL) };
        // SAFETY: the status may be written to.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(last.unwrap().0, path);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn what_killed_processes_left_goes() {
        let process = std::process::id();
        let directory = std::env::temp_dir().join(format!("lowtide-metrics-left-{process}"));
        fs::create_dir_all(&directory).unwrap();
        let [path, left, others, alive] = ["job", "job.pid7", "job.pid8", "job.rank1"]
            .map(|name| directory.join(format!("{name}.prom")));
        for path in [&path, &left, &others, &alive] {
            fs::write(path, "").unwrap();
        }
        // Of one without a lock it is not known whose it is.
        for path in [&path, &left] {
            fs::write(lock_of(path), "").unwrap();
        }
        let (_, _claim) = own_file(&alive).unwrap();
        sweep(&path);
        assert!(!left.exists() && !lock_of(&left).exists());
        assert!(
            [&path, &others, &alive]
                .into_iter()
                .all(|path| path.exists())
        );
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn who_finds_a_port_in_use_is_told_what_to_do() {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = taken.local_addr().unwrap();
        let error = listen(address).unwrap_err();
        let expected = format!(
            "another process has {address}; choose another port, or a path that ends in .prom, of which each process \
             has a file of its own"
        );
        assert_eq!(listen_text(address, &error), expected);
    }
}
