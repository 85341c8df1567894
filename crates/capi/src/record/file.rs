//! Which file a process records to: one of its own.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use lowtide_files::{NewFile, Readers};
use lowtide_trace::{EarlierFiles, file_names};

/// What becomes of a file that has the name already.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Existing<'a> {
    /// It stays, whatever it is, and the new one has another name.
    Stays,
    /// A recording is replaced, and anything else refused.
    IsReplaced,
    /// A recording is replaced if it is one of these, and stays otherwise, as that of another process of the job does.
    /// Anything else is refused.
    IsReplacedIfOf(&'a EarlierFiles),
}

/// Returns a new file for what this process records, and where it is: at `path`; with `.rank3` before the
/// extension in a process of several ranks, as `torchrun` starts them; and with `.pid1234` there where a file stays
/// that has that already. It is for this user alone: stacks name files.
///
/// # Errors
///
/// If the file cannot be created, or would replace what is no recording of this user: a FIFO that was opened would keep
/// the job waiting.
pub(crate) fn create(
    path: &Path,
    existing: Existing<'_>,
    variable: impl Fn(&str) -> Option<String>,
) -> io::Result<(File, PathBuf)> {
    let of_job = path;
    let path = file_names::of_rank(path, variable);
    let earlier = match existing {
        Existing::Stays => return create_beside(path),
        Existing::IsReplaced => {
            file_names::check_replaceable(&path)?;
            let file = NewFile::create(&path, Readers::User)?.rename()?;
            return Ok((file, path));
        }
        Existing::IsReplacedIfOf(earlier) => earlier,
    };
    // A rank's file would lie beside a directory.
    if of_job.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    file_names::check_replaceable(&path)?;
    let created = match earlier.replace(&path)? {
        Some(file) => (file, path),
        None => create_beside(path)?,
    };
    // Now there is a recording, of which they are no part.
    earlier.remove(of_job);
    Ok(created)
}

/// Returns a new file at `path`, or with this process's number in its name where there is one.
fn create_beside(path: PathBuf) -> io::Result<(File, PathBuf)> {
    let process = std::process::id();
    // A number is another process's in another container, and may be an earlier one's here.
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
    use std::fs;
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn each_process_has_a_file_of_its_own() {
        let process = std::process::id();
        let directory = std::env::temp_dir().join(format!("lowtide-record-{process}"));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("a job.lowtide");
        let none = EarlierFiles::default();
        let names = [
            ("a job.lowtide", Existing::Stays),
            (&*format!("a job.pid{process}.lowtide"), Existing::Stays),
            (
                &*format!("a job.pid{process}-1.lowtide"),
                Existing::IsReplacedIfOf(&none),
            ),
            (
                &*format!("a job.pid{process}-2.lowtide"),
                Existing::IsReplacedIfOf(&none),
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
    fn what_an_earlier_job_left_is_replaced_once_there_is_a_new_file() {
        let process = std::process::id();
        let directory = std::env::temp_dir().join(format!("lowtide-earlier-job-{process}"));
        fs::create_dir_all(&directory).unwrap();
        let path = |name: &str| directory.join(name);
        for name in ["a.lowtide", "a.rank1.lowtide"] {
            fs::write(path(name), b"lowtide\n\x01\0").unwrap();
        }
        let earlier = EarlierFiles::of(&path("a.lowtide")).unwrap();
        let existing = Existing::IsReplacedIfOf(&earlier);
        let (_, found) = create(&path("a.lowtide"), existing, |_| None).unwrap();
        assert_eq!(found, path("a.lowtide"));
        assert_eq!(fs::metadata(&found).unwrap().len(), 0);
        assert!(!path("a.rank1.lowtide").exists());
        // The next process of the job leaves what the first has made.
        let (_, found) = create(&path("a.lowtide"), existing, |_| None).unwrap();
        assert_eq!(found, path(&format!("a.pid{process}.lowtide")));
        fs::remove_dir_all(&directory).unwrap();
    }
}
