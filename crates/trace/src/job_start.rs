//! The start time of a recorded job. A file written before it belongs to an earlier recording.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;

/// A time by a file system's clock. A recording last written before it belongs to an earlier job.
///
/// `lowtide record` passes it as text to the job's processes, in an environment variable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct JobStart {
    seconds: i64,
    nanoseconds: i64,
}

impl JobStart {
    /// The name of the environment variable.
    pub const VARIABLE: &str = "LOWTIDE_RECORD_START";

    /// Returns the modification time of `new`, a file that was just created.
    ///
    /// # Errors
    ///
    /// If the file system does not report it.
    pub fn of(new: &File) -> io::Result<JobStart> {
        Ok(JobStart::of_write(&new.metadata()?))
    }

    /// Returns the start for a text of [`to_text`](JobStart::to_text); `None` for any other text.
    pub fn parse(text: &str) -> Option<JobStart> {
        let (seconds, nanoseconds) = text.split_once('.')?;
        Some(JobStart {
            seconds: seconds.parse().ok()?,
            nanoseconds: nanoseconds.parse().ok()?,
        })
    }

    /// Returns the text for the environment variable.
    pub fn to_text(self) -> String {
        format!("{}.{}", self.seconds, self.nanoseconds)
    }

    /// Returns whether a file was last written before the job started.
    pub fn is_after(self, file: &Metadata) -> bool {
        let written = JobStart::of_write(file);
        (written.seconds, written.nanoseconds) < (self.seconds, self.nanoseconds)
    }

    fn of_write(file: &Metadata) -> JobStart {
        JobStart {
            seconds: file.mtime(),
            nanoseconds: file.mtime_nsec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_what_was_written_before_is_earlier() {
        let name = format!("lowtide-job-start-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let file = File::create(&path).unwrap();
        let start = JobStart::of(&file).unwrap();
        assert_eq!(JobStart::parse(&start.to_text()), Some(start));
        assert!(!start.is_after(&file.metadata().unwrap()));
        let written = file.metadata().unwrap().modified().unwrap();
        file.set_modified(written - Duration::from_nanos(1))
            .unwrap();
        assert!(start.is_after(&file.metadata().unwrap()));
        file.set_modified(written + Duration::from_secs(1)).unwrap();
        assert!(!start.is_after(&file.metadata().unwrap()));
        fs::remove_file(&path).unwrap();
        for wrong in ["", "1", "x.y", "1.2.3"] {
            assert_eq!(JobStart::parse(wrong), None, "{wrong}");
        }
    }
}
