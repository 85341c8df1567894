//! Making lowtide ready in a process that is served, at its first request.

use std::sync::OnceLock;

use lowtide_core::Config;
use lowtide_cuda::PrimaryContexts;

use super::{mode, summary};
use crate::boundary::run_and_report;
use crate::error::{Error, Status};
use crate::settings::{self, Choice};
use crate::{cuda, environment, fork};

/// Where the threads of a process work that lowtide serves, once it does. `None` if it cannot, of which the user was
/// told.
static STARTED: OnceLock<Option<&PrimaryContexts>> = OnceLock::new();

/// Returns the process's contexts and makes lowtide ready, if that works and had not been done.
pub(super) fn start() -> Option<&'static PrimaryContexts> {
    let contexts = STARTED.get_or_init(|| {
        let mut contexts = None;
        let status = run_and_report(|| {
            contexts = Some(prepare().map_err(|error| {
                let text = format_args!("{}; the program runs without lowtide", error.text);
                Error::new(error.status, text)
            })?);
            Ok(())
        });
        if status == Status::Ok && mode::reports() {
            summary::tell_at_exit();
        }
        contexts
    });
    *contexts
}

/// Returns the process's contexts where lowtide has served something; `None` in the child of a fork, in which CUDA does
/// not work any more, and says so.
pub(super) fn started() -> Option<&'static PrimaryContexts> {
    if fork::is_forked() {
        return None;
    }
    *STARTED.get()?
}

fn prepare() -> Result<&'static PrimaryContexts, Error> {
    let choice = Choice::of_environment_alone(environment::variable);
    // A program that loads lowtide besides may have chosen already.
    match settings::configure(choice) {
        Err(error) if error.status != Status::Started => return Err(error),
        _ => {}
    }
    if let Config::Caching(options) = settings::config()?
        && options.expandable_segments
    {
        let text =
            "expandable_segments is not for memory that other processes and cards may be given";
        return Err(Error::new(Status::Config, text));
    }
    cuda::contexts()
}
