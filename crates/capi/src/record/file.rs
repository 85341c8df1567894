//! The file that a process records to. Each process has its own.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use lowtide_files::{NewFile, Readers};
use lowtide_trace::{JobStart, file_names};

/// What happens to an existing file of the same name.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Existing {
    /// It stays, whatever it is, and the new file gets another name.
    Stays,
    /// A recording is replaced; any other file is refused.
    IsReplaced,
    /// A recording is replaced if it was written before the job started. Otherwise it stays, because another
    /// process of the job writes it. Without a start time, a recording stays. Any other file is refused.
    IsReplacedIfBefore(Option<JobStart>),
}

/// Returns a new file for this process's recording, and its path: `path` itself; with `.rank3` before the
/// extension if the job has several ranks, as `torchrun` starts them; and with `.pid1234` there if a file of that
/// name stays. Only this user can read it, because stacks name files.
///
/// # Errors
///
/// If the file cannot be created, or would replace a file that is not a recording of this user. For example,
/// opening a FIFO would block the job.
pub(crate) fn create(
    path: &Path,
    existing: Existing,
    variable: impl Fn(&str) -> Option<String>,
) -> io::Result<(File, PathBuf)> {
    let of_job = path;
    let path = file_names::of_rank(path, variable);
    let start = match existing {
        Existing::Stays => return create_beside(path),
        Existing::IsReplaced => {
            file_names::check_replaceable(&path)?;
            let file = NewFile::create(&path, Readers::User)?.rename()?;
            return Ok((file, path));
        }
        Existing::IsReplacedIfBefore(start) => start,
    };
    // Otherwise a rank's file would be created beside the directory.
    if of_job.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    file_names::check_replaceable(&path)?;
    if let Some(start) = start
        && let Some(file) = replace_earlier(&path, start)?
    {
        return Ok((file, path));
    }
    create_beside(path)
}

/// Replaces the recording at `path` if it was written before the job started, and returns the new file. Returns
/// `None` if it was not, or if another process has it locked, which replaces it.
fn replace_earlier(path: &Path, start: JobStart) -> io::Result<Option<File>> {
    let Some(earlier) = lowtide_files::open_own(path)? else {
        return Ok(None);
    };
    // Never waits, because anyone who may read a file can lock it for ever. Without locks, as on some network
    // file systems, two processes that come at the same moment may both replace it.
    if matches!(earlier.try_lock(), Err(TryLockError::WouldBlock)) {
        return Ok(None);
    }
    let found = earlier.metadata()?;
    // Another process may have replaced it since it was opened.
    let is_there = fs::symlink_metadata(path).is_ok_and(|there| there.ino() == found.ino());
    if !is_there || !start.is_after(&found) {
        return Ok(None);
    }
    NewFile::create(path, Readers::User)?.rename().map(Some)
}

/// Returns a new file at `path`, or with this process's number in its name if `path` exists.
fn create_beside(path: PathBuf) -> io::Result<(File, PathBuf)> {
    let process = std::process::id();
    // A process in another container may have the same number, and so may an earlier process here.
    let others = (0..).map(|earlier| file_names::of_process(&path, process, earlier));
    for path in [path.clone()].into_iter().chain(others) {
        match lowtide_files::create_new(&path, Readers::User) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            created => return Ok((created?, path)),
        }
    }
    Err(ErrorKind::AlreadyExists.into())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_process_has_a_file_of_its_own() {
        let process = std::process::id();
        let directory = std::env::temp_dir().join(format!("lowtide-record-{process}"));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("a job.lowtide");
        let names = [
            ("a job.lowtide", Existing::Stays),
            (&*format!("a job.pid{process}.lowtide"), Existing::Stays),
            (
                &*format!("a job.pid{process}-1.lowtide"),
                Existing::IsReplacedIfBefore(None),
            ),
            (
                &*format!("a job.pid{process}-2.lowtide"),
                Existing::IsReplacedIfBefore(None),
            ),
            ("a job.lowtide", Existing::IsReplaced),
        ];
        for (expected, existing) in names {
            let (mut file, found) = create(&path, existing, |_| None).unwrap();
            assert_eq!(found, directory.join(expected));
            assert_eq!(fs::metadata(&found).unwrap().len(), 0);
            let mode = file.metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            file.write_all(b"lowtide\n\x01\0").unwrap();
        }
        for (name, _) in names {
            assert_eq!(fs::read(directory.join(name)).unwrap(), b"lowtide\n\x01\0");
        }
        let ranks = |name: &str| match name {
            "RANK" => Some("5".to_owned()),
            "WORLD_SIZE" => Some("6".to_owned()),
            _ => None,
        };
        let (_, found) = create(&directory.join("x"), Existing::Stays, ranks).unwrap();
        assert_eq!(found, directory.join("x.rank5"));
        let notes = directory.join("notes.txt");
        fs::write(&notes, "mine").unwrap();
        let error = create(&notes, Existing::IsReplaced, |_| None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&notes).unwrap(), b"mine");
        let device = Path::new("/dev/null");
        let error = create(device, Existing::IsReplaced, |_| None).unwrap_err();
        assert!(error.to_string().starts_with("is a device"), "{error}");
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn what_an_earlier_job_left_under_the_same_name_is_replaced() {
        let process = std::process::id();
        let directory = std::env::temp_dir().join(format!("lowtide-earlier-job-{process}"));
        fs::create_dir_all(&directory).unwrap();
        let path = |name: &str| directory.join(name);
        for name in ["a.lowtide", "a.rank1.lowtide"] {
            fs::write(path(name), b"lowtide\n\x01\0").unwrap();
        }
        let earlier = File::open(path("a.lowtide")).unwrap();
        let written = earlier.metadata().unwrap().modified().unwrap();
        earlier
            .set_modified(written - Duration::from_secs(1))
            .unwrap();
        let start = JobStart::of(&File::create(path("new")).unwrap()).unwrap();
        let existing = Existing::IsReplacedIfBefore(Some(start));
        // Another user who may read the file may keep it locked.
        earlier.lock().unwrap();
        let (_, found) = create(&path("a.lowtide"), existing, |_| None).unwrap();
        assert_eq!(found, path(&format!("a.pid{process}.lowtide")));
        earlier.unlock().unwrap();
        let (_, found) = create(&path("a.lowtide"), existing, |_| None).unwrap();
        assert_eq!(found, path("a.lowtide"));
        assert_eq!(fs::metadata(&found).unwrap().len(), 0);
        assert!(path("a.rank1.lowtide").exists(), "it has another name");
        // The next process of the job does not replace the file of the first.
        let (_, found) = create(&path("a.lowtide"), existing, |_| None).unwrap();
        assert_eq!(found, path(&format!("a.pid{process}-1.lowtide")));
        fs::remove_dir_all(&directory).unwrap();
    }
}
