//! This process's statistics for Prometheus: over HTTP, or in a file for node_exporter.
//!
//! `LOWTIDE_METRICS` is a port, an address with a port, or a path that ends in `.prom`. A port without an address
//! listens on this machine only. All processes of a job have the same variable. If a machine has several ranks
//! (`LOCAL_RANK`), the rank is added to the port and to the file's name. If several processes have the same file,
//! the last write wins. If several have the same port, the first gets it, and each other prints a warning.

mod http;

use std::io::{self, ErrorKind, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use lowtide_files::{NewFile, Readers};

use crate::boundary;
use crate::error::{Error, Status};
use crate::exit::at_exit;
use crate::exposition::Reader;
use crate::threads::ParentsOnly;
use crate::{environment, exposition};

/// How often the file is written.
const FILE_EVERY: Duration = Duration::from_secs(5);

/// Where the statistics go.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Target {
    Address(SocketAddr),
    File(PathBuf),
}

/// Exports the statistics to the target in `LOWTIDE_METRICS` from now on. If that fails, a warning is printed
/// once and the program continues.
pub(crate) fn start() {
    let Some(path) = environment::path_variable("LOWTIDE_METRICS") else {
        return;
    };
    let _ = boundary::run_and_report(|| {
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
    /// Returns the target that the variable names, for one of several ranks on a machine.
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
                "port 0 would be any free port, which is not reported: name one from 1 to 65535"
                    .to_owned(),
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

/// Returns the warning for an `address` that cannot be listened on. If another process has the port, it says what
/// to do.
fn listen_text(address: SocketAddr, error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::AddrInUse => format!(
            "another process has {address}; choose another port, or a path that ends in .prom"
        ),
        _ => error.to_string(),
    }
}

/// Writes the file now, so that an error is reported at once, and then periodically. The file is removed when the
/// process ends, but not when it is killed; node_exporter exports the file's age.
fn write_repeatedly(path: &Path) -> io::Result<()> {
    write_file(path)?;
    let path = path.to_owned();
    let removed = path.clone();
    at_exit(move || drop(lowtide_files::remove(&removed)));
    let thread = thread::Builder::new().name("lowtide-metrics".to_owned());
    thread.spawn(move || {
        loop {
            thread::sleep(FILE_EVERY);
            // A full disk may have room later, and readers see the file's age.
            let _ = write_file(&path);
        }
    })?;
    Ok(())
}

/// Replaces the file atomically for its readers. Its lines name the process, because node_exporter merges the
/// files of several processes.
fn write_file(path: &Path) -> io::Result<()> {
    let process = std::process::id().to_string();
    let text = exposition::text(&[("pid", process)], Reader::Anyone);
    let text = text.map_err(|error| io::Error::other(error.text))?;
    let new = NewFile::create(path, Readers::Umask)?;
    new.file().write_all(text.as_bytes())?;
    new.rename().map(drop)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
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
        let any = "port 0 would be any free port, which is not reported: name one from 1 to 65535";
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
    fn a_port_in_use_is_reported_with_what_to_do() {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = taken.local_addr().unwrap();
        let error = listen(address).unwrap_err();
        let expected = format!(
            "another process has {address}; choose another port, or a path that ends in .prom"
        );
        assert_eq!(listen_text(address, &error), expected);
    }
}
