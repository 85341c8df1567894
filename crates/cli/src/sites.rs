//! Where blocks come from, as text and as JSON.

use std::fmt::Write as _;

use lowtide_history::{Site, StepSource, Steps, stream_text};
use lowtide_trace::{OneLine, StackTable};
use serde::Serialize;

use crate::format;

/// So many frames tell most; the JSON has all.
const FRAMES_MAX: usize = 8;

/// A site in JSON: a stack, or where there is none, a size and a stream.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum SiteRow<'a> {
    Stack {
        /// Innermost first.
        stack: Vec<FrameRow<'a>>,
    },
    Size {
        size_max_bytes: u64,
        stream: String,
    },
}

/// A function on a stack.
#[derive(Debug, Serialize)]
pub(crate) struct FrameRow<'a> {
    function: &'a str,
    file: &'a str,
    line: u32,
}

/// A job's steps in JSON.
#[derive(Debug, Serialize)]
pub(crate) struct StepsRow<'a> {
    count: usize,
    /// `annotation`, `period`, or `parts` where they were not found: then the recording is cut evenly.
    found_by: &'static str,
    annotation: Option<&'a str>,
    /// Which share of the kinds of requests repeats from step to step.
    repeated_share: Option<f64>,
}

impl<'a> SiteRow<'a> {
    pub(crate) fn new(site: Site, stacks: &'a StackTable) -> SiteRow<'a> {
        match site {
            Site::Stack(stack) => {
                let frames = stacks.frames(stack).map(|frame| FrameRow {
                    function: frame.name,
                    file: frame.filename,
                    line: frame.line,
                });
                SiteRow::Stack {
                    stack: frames.collect(),
                }
            }
            Site::Size { size_max, stream } => SiteRow::Size {
                size_max_bytes: size_max.get(),
                stream: stream_text(stream),
            },
        }
    }
}

impl<'a> StepsRow<'a> {
    pub(crate) fn new(steps: &'a Steps) -> StepsRow<'a> {
        let (found_by, annotation, repeated_share) = match &steps.source {
            StepSource::Annotation(name) => ("annotation", Some(&**name), None),
            StepSource::Period(share) => ("period", None, Some(*share)),
            StepSource::Parts => ("parts", None, None),
        };
        StepsRow {
            count: steps.len(),
            found_by,
            annotation,
            repeated_share,
        }
    }
}

/// Returns a sentence on the steps, without its end.
pub(crate) fn steps_text(steps: &Steps) -> String {
    let count = format::counted(steps.len() as u64, "step");
    match &steps.source {
        StepSource::Annotation(name) => {
            format!("{count}, by the program's own mark `{}`", OneLine(name))
        }
        StepSource::Period(share) => format!(
            "{count}, by the period of the allocations: {:.0} % of their kinds repeat",
            100.0 * share
        ),
        StepSource::Parts => {
            format!(
                "its steps were not found; {} equal parts stand for them",
                steps.len()
            )
        }
    }
}

/// Returns lines that say where blocks come from, innermost function first.
pub(crate) fn site_text(site: Site, stacks: &StackTable) -> String {
    let mut text = String::new();
    match site {
        Site::Stack(stack) => {
            let frames = stacks.frames(stack);
            let others = frames.len().saturating_sub(FRAMES_MAX);
            for frame in frames.take(FRAMES_MAX) {
                let (name, file) = (OneLine(frame.name), OneLine(frame.filename));
                let _ = writeln!(text, "    {name}  {file}:{}", frame.line);
            }
            if others > 0 {
                let _ = writeln!(
                    text,
                    "    … {}",
                    format::counted(others as u64, "more frame")
                );
            }
        }
        Site::Size { size_max, stream } => {
            let stream = stream_text(stream);
            let _ = writeln!(
                text,
                "    requests of about {size_max} in stream {stream} (no stack is recorded)"
            );
        }
    }
    text
}
