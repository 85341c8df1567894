//! Which file a process records to: one of its own.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use lowtide_trace::file_names;

/// Returns a new file for what this process records, and where it is: at `path`; with `.rank3` before the
/// extension in a process of several ranks, as `torchrun` starts them; and with `.pid1234` there where another
/// process of the job has that already, unless it `replaces` the recording that is there. What is no file, as a
/// device or a pipe, is written to as it is. It is for this user alone: stacks name files.
///
/// # Errors
///
/// If the file cannot be created, or would replace what is no recording.
pub(crate) fn create(
    path: &Path,
    replaces: bool,
    variable: impl Fn(&str) -> Option<String>,
) -> io::Result<(File, PathBuf)> {
    let path = file_names::of_rank(path, variable);
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    let is_special = fs::metadata(&path).is_ok_and(|found| !found.is_file() && !found.is_dir());
    if replaces || is_special {
        file_names::check_replaceable(&path)?;
        let file = options.create(true).truncate(true).open(&path)?;
        return Ok((file, path));
    }
    options.create_new(true);
    let process = std::process::id();
    // A number is another process's in another container, and may be an earlier one's here.
    let others = (0..).map(|earlier| file_names::of_process(&path, process, earlier));
    for path in [path.clone()].into_iter().chain(others) {
        match options.open(&path) {
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

    use super::*;

    #[test]
    fn each_process_has_a_file_of_its_own() {
        let process = std::process::id();
        let directory = std::env::temp_dir().join(format!("lowtide-record-{process}"));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("a job.lowtide");
        let names = [
            ("a job.lowtide", false),
            (&*format!("a job.pid{process}.lowtide"), false),
            (&*format!("a job.pid{process}-1.lowtide"), false),
            (&*format!("a job.pid{process}-2.lowtide"), false),
            ("a job.lowtide", true),
        ];
        for (expected, replaces) in names {
            let (mut file, found) = create(&path, replaces, |_| None).unwrap();
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
        let (_, found) = create(&directory.join("x"), false, ranks).unwrap();
        assert_eq!(found, directory.join("x.rank5"));
        let notes = directory.join("notes.txt");
        fs::write(&notes, "mine").unwrap();
        let error = create(&notes, true, |_| None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&notes).unwrap(), b"mine");
        let device = Path::new("/dev/null");
        for replaces in [false, true] {
            let (_, found) = create(device, replaces, |_| None).unwrap();
            assert_eq!(found, device);
        }
        fs::remove_dir_all(&directory).unwrap();
    }
}
