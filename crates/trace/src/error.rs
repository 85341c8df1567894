//! The errors of this crate. Each displays as one line.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::text::OneLine;

/// The result of reading or writing a recording.
pub(crate) type Result<T, E = TraceError> = std::result::Result<T, E>;

/// The error of reading or writing a recording.
///
/// Displays as one line: the file, what is wrong, where, and what to do about it, if anything.
#[derive(Debug)]
pub struct TraceError(Box<Inner>);

#[derive(Debug)]
struct Inner {
    kind: ErrorKind,
    what: String,
    place: Place,
    path: Option<PathBuf>,
    cause: Option<io::Error>,
}

/// The kinds of errors, one for each predicate of [`TraceError`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ErrorKind {
    Io,
    Truncated,
    Foreign,
    Code,
    Malformed,
    Limit,
    Contradiction,
    Version,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    Nowhere,
    Byte(u64),
    Event { device: u32, index: usize },
}

impl TraceError {
    pub(crate) fn new(kind: ErrorKind, what: impl Into<String>) -> TraceError {
        TraceError(Box::new(Inner {
            kind,
            what: what.into(),
            place: Place::Nowhere,
            path: None,
            cause: None,
        }))
    }

    pub(crate) fn malformed(what: impl Into<String>) -> TraceError {
        TraceError::new(ErrorKind::Malformed, what)
    }

    /// Returns the error of a file that is not a recording.
    pub(crate) fn foreign(what: impl Into<String>) -> TraceError {
        TraceError::new(ErrorKind::Foreign, what)
    }

    /// Returns the error of a recording that is readable but cannot have happened.
    #[cold]
    pub(crate) fn contradiction(what: impl Into<String>) -> TraceError {
        TraceError::new(ErrorKind::Contradiction, what)
    }

    /// Adds the byte of the decompressed file at which the error is, unless it has one already.
    pub(crate) fn at_byte(mut self, offset: u64) -> TraceError {
        if let Place::Nowhere = self.0.place {
            self.0.place = Place::Byte(offset);
        }
        self
    }

    /// Adds the part of the recording in which the error is.
    pub(crate) fn in_part(mut self, part: &str) -> TraceError {
        self.0.what = format!("{part}: {}", self.0.what);
        self
    }

    /// Adds the event of a device's recording at which the error is.
    pub(crate) fn at_event(mut self, device: u32, index: usize) -> TraceError {
        self.0.place = Place::Event { device, index };
        self
    }

    pub(crate) fn in_file(mut self, path: &Path) -> TraceError {
        self.0.path = Some(path.to_owned());
        self
    }

    /// Returns whether the operating system failed to read or write.
    pub fn is_io(&self) -> bool {
        self.0.kind == ErrorKind::Io
    }

    /// Returns whether the file is truncated.
    pub fn is_truncated(&self) -> bool {
        self.0.kind == ErrorKind::Truncated
    }

    /// Returns whether the file is not a recording.
    pub fn is_not_a_recording(&self) -> bool {
        self.0.kind == ErrorKind::Foreign
    }

    /// Returns whether the file is a pickle that wants to run code. Its code is never run.
    pub fn is_code(&self) -> bool {
        self.0.kind == ErrorKind::Code
    }

    /// Returns whether the file is damaged, or has unexpected contents where a recording has others.
    pub fn is_malformed(&self) -> bool {
        self.0.kind == ErrorKind::Malformed
    }

    /// Returns whether the file would take more memory or time than its size justifies.
    pub fn is_limit(&self) -> bool {
        self.0.kind == ErrorKind::Limit
    }

    /// Returns whether the recording is readable but cannot have happened.
    pub fn is_contradiction(&self) -> bool {
        self.0.kind == ErrorKind::Contradiction
    }

    /// Returns whether a newer lowtide wrote the file.
    pub fn is_newer_version(&self) -> bool {
        self.0.kind == ErrorKind::Version
    }
}

impl From<io::Error> for TraceError {
    fn from(cause: io::Error) -> TraceError {
        let mut error = TraceError::new(ErrorKind::Io, cause.to_string());
        error.0.cause = Some(cause);
        error
    }
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.0.path {
            write!(f, "{}: ", OneLine(&path.to_string_lossy()))?;
        }
        match self.0.place {
            Place::Nowhere => {}
            Place::Byte(offset) => write!(f, "byte {offset}: ")?,
            Place::Event { device, index } => write!(f, "device {device}, event {index}: ")?,
        }
        write!(f, "{}", OneLine(&self.0.what))
    }
}

impl std::error::Error for TraceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.cause.as_ref().map(|cause| cause as _)
    }
}
