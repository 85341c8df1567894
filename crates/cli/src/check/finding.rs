//! What a check found.

use std::path::Path;

use console::style;

use crate::format;
use crate::job::Job;

/// What a check found about one device.
#[derive(Debug)]
pub(super) struct Finding {
    /// The option that asks for the check.
    pub(super) name: &'static str,
    /// The path of the recording.
    pub(super) path: String,
    pub(super) device: u32,
    pub(super) passed: bool,
    /// The figures, as a sentence without a full stop.
    pub(super) what: String,
}

impl Finding {
    /// Returns what a check found about a job.
    pub(super) fn new(name: &'static str, job: &Job, passed: bool, what: String) -> Finding {
        Finding {
            name,
            path: job.path.clone(),
            device: job.device,
            passed,
            what,
        }
    }

    /// Returns the line for people.
    pub(super) fn line(&self) -> String {
        let verdict = if self.passed {
            style("ok    ")
        } else {
            style("FAILED").red().bold()
        };
        let path = format::path(Path::new(&self.path));
        format!(
            "{verdict}  {}  {path}, device {}: {}\n",
            self.name, self.device, self.what
        )
    }
}
