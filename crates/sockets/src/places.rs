//! The directories in which the sockets are.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use lowtide_files::unguessable_number;
use rustix::fs::{Mode, OFlags, open};
use rustix::process::geteuid;

use crate::directory::{Directory, names_in};

/// The directory's name in a runtime directory.
const NAME: &str = "lowtide";

/// The directories with the sockets of this process's user: `lowtide` in a runtime directory, or `lowtide-UID` in
/// `/tmp`. Each boot of a machine has its own directory in there. Several machines may share one file system, and a
/// socket of another machine refuses connections like one whose process ended.
#[derive(Debug)]
pub struct Places {
    /// Runtime directories, in order of preference.
    runtime: Vec<PathBuf>,
    /// A directory in which every user may create entries.
    temporary: PathBuf,
    /// Identifies the machine and its boot.
    boot: String,
}

impl Places {
    /// Returns the directories for a process whose `XDG_RUNTIME_DIR` is `named`.
    ///
    /// Another process of the user may have a different `XDG_RUNTIME_DIR`, or none, as under `sudo`, `cron` and in
    /// containers. So systemd's usual runtime directory and `/tmp` are always included.
    pub fn new(named: Option<OsString>) -> Places {
        let named = named.map(PathBuf::from).filter(|path| path.is_absolute());
        let usual = PathBuf::from(format!("/run/user/{}", geteuid().as_raw()));
        Places {
            runtime: named.into_iter().chain([usual]).collect(),
            temporary: "/tmp".into(),
            boot: boot(),
        }
    }

    /// Returns the directory for this process's own sockets, and creates it if it does not exist.
    ///
    /// # Errors
    ///
    /// The system's error.
    pub fn own(&self) -> io::Result<Directory> {
        let in_runtime = |path: &PathBuf| {
            let lowtide = Directory::open_or_make(Directory::open_path(path)?, NAME)?;
            Directory::open_or_make(lowtide, &self.boot)
        };
        let mut runtime = self.runtime.iter();
        match runtime.find_map(|path| in_runtime(path).ok()) {
            Some(found) => Ok(found),
            None => Directory::open_or_make(self.own_temporary()?, &self.boot),
        }
    }

    /// Returns all directories of this user that exist, each once.
    pub fn all(&self) -> Vec<Directory> {
        let in_runtime = |path: &PathBuf| Directory::open(Directory::open_path(path)?, NAME);
        let runtime = self.runtime.iter().filter_map(|path| in_runtime(path).ok());
        let temporary = self
            .open_temporary()
            .and_then(|parent| in_temporary(&parent));
        let mut seen = Vec::new();
        let of_any = runtime.chain(temporary.into_iter().flatten());
        let of_this = of_any.filter_map(|found| Directory::open(found, &self.boot).ok());
        let mut all: Vec<Directory> = of_this.collect();
        all.retain(|directory| {
            let identity = directory.identity().ok();
            let is_new = identity.is_some() && !seen.contains(&identity);
            seen.push(identity);
            is_new
        });
        all
    }

    /// Returns the user's directory in the temporary one. Other users may have taken the usual name and any number
    /// of others, so the last resort is a name that cannot be guessed.
    fn own_temporary(&self) -> io::Result<Directory> {
        let parent = self.open_temporary()?;
        let usual = usual_name();
        if let Ok(found) = Directory::open_or_make(&parent, &usual) {
            return Ok(found);
        }
        if let Some(found) = in_temporary(&parent)?.pop() {
            return Ok(found);
        }
        Directory::open_or_make(&parent, &format!("{usual}-{:032x}", unguessable_number()?))
    }

    fn open_temporary(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(open(&self.temporary, flags, Mode::empty())?)
    }
}

fn boot() -> String {
    // A sandbox may have no boot id.
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let id = id.trim();
    format!("boot-{id}")
}

fn usual_name() -> String {
    format!("lowtide-{}", geteuid().as_raw())
}

/// Returns the user's directories in `parent`, the temporary directory of all users.
fn in_temporary(parent: &OwnedFd) -> io::Result<Vec<Directory>> {
    let usual = usual_name();
    let is_candidate = |name: &OsStr| {
        let rest = name.as_bytes().strip_prefix(usual.as_bytes());
        rest.is_some_and(|rest| rest.is_empty() || rest[0] == b'-')
    };
    let names = names_in(parent)?;
    let candidates = names.iter().filter(|name| is_candidate(name));
    let own = candidates.filter_map(|name| Directory::open(parent, name.as_os_str()).ok());
    Ok(own.collect())
}

#[cfg(test)]
mod tests;
