//! Recordings that an earlier job has left under the names of a new one: they stay until the new one begins.
//!
//! What starts a job lists them, and the job's processes are given the list as text. The first of them that records
//! puts its file in the place of the earlier one, and removes the others, which would be taken for ranks of the new.

use std::fmt;
use std::fs::{self, File, Metadata, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::thread;
use std::time::Duration;

use lowtide_files::{NewFile, Readers};

use crate::file_names;

/// Linux takes 128 KiB as one variable of the environment, and a file is told in up to 63 characters.
const FILES_MAX: usize = 2_048;
/// A process of the job that removes a file has it locked for a moment only.
const CLAIMS: u32 = 20;
const CLAIM_EVERY: Duration = Duration::from_millis(50);

/// Recordings as they were at some time. One that was written to since is none of them: a name and a number of a file
/// come again, but not with the time of its last change.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct EarlierFiles {
    states: Vec<State>,
}

/// A file as it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct State {
    inode: u64,
    modified_s: i64,
    modified_ns: i64,
}

impl EarlierFiles {
    /// Returns the recordings that are there of this name, of its processes and ranks.
    ///
    /// # Errors
    ///
    /// If the directory cannot be read, or there are more than can be told to a new process, which are some thousands.
    pub fn of(file: &Path) -> io::Result<EarlierFiles> {
        let files = file_names::files_of(file)?;
        if files.len() > FILES_MAX {
            let what = format!(
                "has {} recordings of earlier processes, more than the {FILES_MAX} that are replaced: remove them, or \
                 choose another name",
                files.len()
            );
            return Err(io::Error::new(ErrorKind::AlreadyExists, what));
        }
        // One that has gone meanwhile is not there.
        let states = files
            .iter()
            .filter_map(|file| fs::symlink_metadata(file).ok());
        Ok(EarlierFiles {
            states: states.map(|metadata| State::of(&metadata)).collect(),
        })
    }

    /// Returns what [`Display`](fmt::Display) has written; what it has not is passed over.
    pub fn parse(text: &str) -> EarlierFiles {
        EarlierFiles {
            states: text.split(',').filter_map(State::parse).collect(),
        }
    }

    /// Returns whether `path` is one of them, unchanged.
    pub fn contain(&self, path: &Path) -> bool {
        fs::symlink_metadata(path).is_ok_and(|there| self.states.contains(&State::of(&there)))
    }

    /// Puts a new file, which is for this user alone, in the place of `path` if that is one of these; `None` if it is
    /// not, as where another process of the job was first, or if somebody keeps it locked.
    ///
    /// # Errors
    ///
    /// If there can be no new file; then the earlier one is left.
    pub fn replace(&self, path: &Path) -> io::Result<Option<File>> {
        for _ in 0..CLAIMS {
            if let Some(_claim) = self.claim(path) {
                return NewFile::create(path, Readers::User)?.rename().map(Some);
            }
            if !self.contain(path) {
                return Ok(None);
            }
            thread::sleep(CLAIM_EVERY);
        }
        Ok(None)
    }

    /// Removes those of `file`'s name that are still there. No file but those is opened: each of a job's processes does
    /// this.
    pub fn remove(&self, file: &Path) {
        if self.states.is_empty() {
            return;
        }
        // One that cannot be removed is no reason not to record.
        for path in file_names::named_as(file).unwrap_or_default() {
            if self.claim(&path).is_some() {
                let _ = lowtide_files::remove(&path);
            }
        }
    }

    /// Returns the file at `path` if it is one of these and nobody else has it locked. Never waits: whoever may read a
    /// file can lock it for ever.
    fn claim(&self, path: &Path) -> Option<File> {
        if !self.contain(path) {
            return None;
        }
        let file = lowtide_files::open_own_to_lock(path).ok()??;
        // A file system without locks has two processes that come at the same moment wrong, at worst.
        if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
            return None;
        }
        // Meanwhile another process may have put its own there, whose number differs as this file is open.
        self.contain(path).then_some(file)
    }
}

impl fmt::Display for EarlierFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, state) in self.states.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(
                f,
                "{comma}{}-{}.{}",
                state.inode, state.modified_s, state.modified_ns
            )?;
        }
        Ok(())
    }
}

impl State {
    fn of(metadata: &Metadata) -> State {
        State {
            inode: metadata.ino(),
            modified_s: metadata.mtime(),
            modified_ns: metadata.mtime_nsec(),
        }
    }

    fn parse(text: &str) -> Option<State> {
        let (inode, modified) = text.split_once('-')?;
        let (modified_s, modified_ns) = modified.rsplit_once('.')?;
        Some(State {
            inode: inode.parse().ok()?,
            modified_s: modified_s.parse().ok()?,
            modified_ns: modified_ns.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;
    use std::sync::mpsc;

    use super::*;

    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Directory {
            let name = format!("lowtide-earlier-{name}-{}", std::process::id());
            let directory = std::env::temp_dir().join(name);
            fs::create_dir_all(&directory).unwrap();
            Directory(directory)
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).unwrap();
            let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name();
            let mut names: Vec<String> = entries
                .map(|entry| name(entry).into_string().unwrap())
                .collect();
            names.sort();
            names
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const RECORDING: &[u8] = b"lowtide\n\x01\0";

    #[test]
    fn only_what_was_there_and_is_unchanged_goes() {
        let directory = Directory::new("unchanged");
        let path = |name: &str| directory.0.join(name);
        for name in ["a.lowtide", "a.rank1.lowtide", "a.pid7.lowtide"] {
            fs::write(path(name), RECORDING).unwrap();
        }
        fs::write(path("a.rank2.lowtide"), "a text").unwrap();
        let earlier = EarlierFiles::of(&path("a.lowtide")).unwrap();
        assert_eq!(EarlierFiles::parse(&earlier.to_string()), earlier);
        assert_eq!(earlier.states.len(), 3);
        // Another job writes to this one, and one of this job has made that one.
        thread::sleep(std::time::Duration::from_millis(20));
        fs::write(path("a.pid7.lowtide"), RECORDING).unwrap();
        fs::write(path("a.pid8.lowtide"), RECORDING).unwrap();
        let replaced = earlier.replace(&path("a.pid8.lowtide"));
        assert!(replaced.unwrap().is_none());
        let replaced = earlier.replace(&path("a.lowtide")).unwrap();
        assert_eq!(replaced.unwrap().metadata().unwrap().len(), 0);
        earlier.remove(&path("a.lowtide"));
        let left = [
            "a.lowtide",
            "a.pid7.lowtide",
            "a.pid8.lowtide",
            "a.rank2.lowtide",
        ];
        assert_eq!(directory.names(), left);
        assert_eq!(fs::read(path("a.lowtide")).unwrap(), b"");
    }

    /// A recording that a symbolic link names is none of the link's name, and a new one is for its user alone.
    #[test]
    fn a_link_is_no_recording() {
        let directory = Directory::new("links");
        let path = |name: &str| directory.0.join(name);
        fs::write(path("a.lowtide"), RECORDING).unwrap();
        symlink("a.lowtide", path("a.rank1.lowtide")).unwrap();
        let earlier = EarlierFiles::of(&path("a.lowtide")).unwrap();
        assert_eq!(earlier.states.len(), 1);
        assert!(!earlier.contain(&path("a.rank1.lowtide")));
        let replaced = earlier.replace(&path("a.rank1.lowtide")).unwrap();
        assert!(replaced.is_none());
        let file = earlier.replace(&path("a.lowtide")).unwrap().unwrap();
        assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o600);
        earlier.remove(&path("a.lowtide"));
        assert_eq!(directory.names(), ["a.lowtide", "a.rank1.lowtide"]);
    }

    /// Of several processes that come at once, one has the earlier file's name, and its own is not taken for that.
    #[test]
    fn one_of_several_takes_the_place() {
        let directory = Directory::new("claims");
        let path = directory.0.join("a.lowtide");
        for _ in 0..50 {
            fs::write(&path, RECORDING).unwrap();
            let earlier = EarlierFiles::of(&path).unwrap();
            let replaced = thread::scope(|scope| {
                let replace = || earlier.replace(&path).unwrap();
                let started: Vec<_> = (0..4).map(|_| scope.spawn(replace)).collect();
                let done = started.into_iter().map(|thread| thread.join().unwrap());
                done.flatten().count()
            });
            assert_eq!(replaced, 1);
            assert_eq!(fs::read(&path).unwrap(), b"");
        }
    }
    /// Another user locks what he may read, for as long as he likes.
    #[test]
    fn a_lock_that_is_kept_is_not_waited_for() {
        let directory = Directory::new("locked");
        let path = directory.0.join("a.lowtide");
        fs::write(&path, RECORDING).unwrap();
        let earlier = EarlierFiles::of(&path).unwrap();
        let other = File::open(&path).unwrap();
        other.lock().unwrap();
        let (send, receive) = mpsc::channel();
        let (file, files) = (path.clone(), earlier.clone());
        thread::spawn(move || {
            let replaced = files.replace(&file).unwrap();
            files.remove(&file);
            send.send(replaced.is_some())
        });
        let replaced = receive.recv_timeout(Duration::from_secs(60));
        assert_eq!(replaced, Ok(false));
        assert_eq!(fs::read(&path).unwrap(), RECORDING);
        drop(other);
        assert!(earlier.replace(&path).unwrap().is_some());
    }
}
