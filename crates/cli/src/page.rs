//! The page about recorded traces that `lowtide report` and `lowtide replay --html` write.

use std::path::Path;

use anyhow::Result;
use lowtide_history::{BlockSizes, History, Leaks, PageData, PageSize, PageTrace};
use lowtide_trace::Trace;

use crate::progress::Progress;
use crate::{format, output};

/// The number of points in each of the page's curves.
pub(crate) const TIMELINE_POINTS: usize = 8192;

/// The history of a trace, and the call sites that grew in it.
pub(crate) struct Findings {
    pub(crate) sizes: BlockSizes,
    pub(crate) history: History,
    pub(crate) leaks: Leaks,
}

impl Findings {
    /// Returns the findings for a trace: of pinned host memory if `is_host`, else of a device. `progress` advances by
    /// the number of events of a device.
    pub(crate) fn of(trace: &Trace, is_host: bool, progress: &Progress) -> Findings {
        let sizes = if is_host {
            BlockSizes::of_host(trace)
        } else {
            BlockSizes::of(trace, progress)
        };
        let history = History::new(trace, &sizes);
        let leaks = Leaks::find(trace, &history);
        Findings {
            sizes,
            history,
            leaks,
        }
    }
}

/// Returns whether the page goes to standard output.
pub(crate) fn is_stdout(target: &Path) -> bool {
    target == Path::new("-")
}

/// Adds a trace to a page, and prints a note if the page contains some blocks only as a sum.
pub(crate) fn add(data: &mut PageData, trace: &PageTrace<'_>) {
    if let Some(folded) = data.add(trace) {
        output::note(&format!(
            "{}: {} up to {}, held for {} at most, are in the page as a sum and not one by one",
            trace.name,
            format::counted(folded.blocks as u64, "block"),
            folded.size_max,
            format::counted(folded.events_max.into(), "event"),
        ));
    }
}

/// Writes a page to `target`, and prints a note if it is too large for browsers.
///
/// # Errors
///
/// If the page cannot be written.
pub(crate) fn write(data: &mut PageData, target: &Path) -> Result<()> {
    if let Some(size) = data.too_large() {
        output::note(&format!("{}: {}", target.display(), too_large_text(size)));
    }
    if is_stdout(target) {
        let mut page = Vec::new();
        data.write_page(&mut page)?;
        return output::print(&page);
    }
    output::write_file(target, |file| Ok(data.write_page(file)?))
}

/// Returns the note about a page that stays too large although small blocks are summed up.
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn too_large_text(size: PageSize) -> String {
    let cause = match size.traces {
        _ if 2 * size.texts_bytes > size.bytes => {
            "most is names, of annotations, functions and files".to_owned()
        }
        1 => "its requests are of ever other sizes, of which a shorter recording has fewer"
            .to_owned(),
        traces => format!(
            "{traces} recorded devices share it; put fewer recordings in a page, or one device of a recording, \
             by `lowtide convert --device`"
        ),
    };
    format!(
        "the page has {:.0} MB, which browsers are slow to show: {cause}",
        size.bytes as f64 / 1e6
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn why_a_page_is_too_large_is_said() {
        let check = |texts_bytes, traces, expected: &str| {
            let text = too_large_text(PageSize {
                bytes: 41_200_000,
                texts_bytes,
                traces,
            });
            assert!(text.starts_with("the page has 41 MB, "), "{text}");
            assert!(text.contains(expected), "{text}");
        };
        check(30_000_000, 100, "most is names");
        check(1_000_000, 100, "100 recorded devices share it");
        check(1_000_000, 1, "a shorter recording has fewer");
    }
}
