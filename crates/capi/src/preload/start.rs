//! Starts lowtide in a process that it serves, at the first request.

use std::sync::OnceLock;

use lowtide_core::Config;
use lowtide_cuda::{PrimaryContexts, call_at_exit};

use super::{mode, summary};
use crate::boundary::run_and_report;
use crate::error::{Error, Status};
use crate::settings::{self, Choice};
use crate::{cuda, environment, fork};

/// The contexts of the process, once lowtide has started. `None` if it cannot start, which was reported to the
/// user.
static STARTED: OnceLock<Option<&PrimaryContexts>> = OnceLock::new();

/// Returns the process's contexts, and starts lowtide if that has not been tried.
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
            // A handler of its own: it runs after the driver's, and what was registered with a device before them.
            call_at_exit(report_summary);
        }
        contexts
    });
    *contexts
}

/// Returns the process's contexts if lowtide has started; `None` in a forked child. CUDA does not work in the
/// child, and the driver's own functions report that.
pub(super) fn started() -> Option<&'static PrimaryContexts> {
    if fork::is_forked() {
        return None;
    }
    *STARTED.get()?
}

extern "C" fn report_summary() {
    if !fork::is_forked() {
        summary::report();
    }
}

fn prepare() -> Result<&'static PrimaryContexts, Error> {
    settings::configure_preloaded(Choice::of_environment_alone(environment::variable))?;
    if let Config::Caching(options) = settings::config()?
        && options.expandable_segments
    {
        let text =
            "expandable_segments is not for memory that other processes and cards may be given";
        return Err(Error::new(Status::Config, text));
    }
    cuda::contexts()
}
