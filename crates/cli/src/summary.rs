//! `lowtide summary`: what a job's memory was for, and what would help, on one screen.

pub(crate) mod figures;
mod report;
pub(crate) mod text;

use anyhow::Result;

use crate::args::SummaryArgs;
use crate::recording::{self, Recording};
use crate::{json, output};
use figures::Summary;

/// Runs `lowtide summary`.
///
/// # Errors
///
/// If an argument or a recording is bad.
pub(crate) fn run(args: &SummaryArgs) -> Result<()> {
    recording::refuse_stdin_twice(&args.traces)?;
    let mut summaries = Vec::new();
    for path in &args.traces {
        for mut recording in Recording::open_all(path, args.device)? {
            recording.note_lost_beginning();
            output::notes(&recording.notes);
            summaries.push(Summary::of(&recording));
        }
    }
    output::print(&match &*summaries {
        _ if args.json => json::text(&summaries.iter().map(report::Json::new).collect::<Vec<_>>())?,
        [summary] => text::one(summary),
        _ => text::several(&summaries),
    })
}
