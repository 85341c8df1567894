//! A progress bar on a terminal, for work that takes over a second.

use std::io::{self, Read};
use std::sync::Once;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar for shorter work would only flicker.
const DELAY: Duration = Duration::from_secs(1);

/// The progress of some work. It is shown on standard error after one second, only on a terminal, and removed on
/// drop.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    started: Instant,
    show: Once,
}

impl Progress {
    /// Returns the progress of the work called `what`, with `total` units to do.
    pub(crate) fn new(what: impl Into<String>, total: u64) -> Progress {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
        bar.set_message(what.into());
        bar.set_style(
            ProgressStyle::with_template("{msg} {wide_bar} {percent:>3} %, {eta} left")
                .expect("the template is a constant"),
        );
        Progress {
            bar,
            started: Instant::now(),
            show: Once::new(),
        }
    }

    /// Adds `units` to the work to do.
    pub(crate) fn extend(&self, units: u64) {
        self.bar.inc_length(units);
    }

    #[cfg(test)]
    fn left(&self) -> u64 {
        self.bar.length().unwrap_or_default() - self.bar.position()
    }
}

impl lowtide_replay::Progress for Progress {
    fn advance(&self, units: u64) {
        self.bar.inc(units);
        if self.started.elapsed() > DELAY {
            self.show
                .call_once(|| self.bar.set_draw_target(ProgressDrawTarget::stderr()));
        }
    }

    fn expect(&self, units: u64) {
        self.extend(units);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// A reader that reports the bytes that were read.
#[derive(Debug)]
pub(crate) struct ReadWithProgress<R> {
    /// The source of the bytes.
    pub(crate) reader: R,
    /// The progress that advances by them.
    pub(crate) progress: Progress,
}

impl<R: Read> Read for ReadWithProgress<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.reader.read(buffer)?;
        lowtide_replay::Progress::advance(&self.progress, length as u64);
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use lowtide_replay::Progress as _;

    use super::Progress;

    #[test]
    fn what_is_expected_is_work_ahead() {
        let progress = Progress::new("replaying", 10);
        progress.expect(20);
        progress.advance(25);
        assert_eq!(progress.left(), 5);
    }
}
