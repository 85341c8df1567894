//! Where the sockets are.

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

/// The directory in a runtime directory.
const NAME: &str = "lowtide";

/// Where the directories of this process's user are: in `lowtide` in a runtime directory, or else in `lowtide-UID` in
/// `/tmp`. Each machine has its own in there since it was started: several may have one file system, and a socket of
/// another one refuses connections as one does whose process ended.
#[derive(Debug)]
pub struct Places {
    /// Runtime directories, the first choice first.
    runtime: Vec<PathBuf>,
    /// A directory in which every user may make entries.
    temporary: PathBuf,
    /// What tells the machine since it was started.
    boot: String,
}

impl Places {
    /// Returns the places of a process whose `XDG_RUNTIME_DIR` is `named`.
    ///
    /// Another process of the user may have another one, or none, as under `sudo`, `cron` and in containers: the
    /// runtime directory that systemd makes is always among the places, and so is `/tmp`.
    pub fn new(named: Option<OsString>) -> Places {
        let named = named.map(PathBuf::from).filter(|path| path.is_absolute());
        let usual = PathBuf::from(format!("/run/user/{}", geteuid().as_raw()));
        Places {
            runtime: named.into_iter().chain([usual]).collect(),
            temporary: "/tmp".into(),
            boot: boot(),
        }
    }

    /// Returns the directory for this process's own sockets, which is made if there is none.
    ///
    /// # Errors
    ///
    /// What the system says.
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

    /// Returns all directories of this user that are there, each once.
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

    /// Another user may have taken the usual name, and any number of others.
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
    // A sandbox may have none.
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let id = id.trim();
    format!("boot-{id}")
}

fn usual_name() -> String {
    format!("lowtide-{}", geteuid().as_raw())
}

/// Returns the user's directories in the one that every user has.
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
