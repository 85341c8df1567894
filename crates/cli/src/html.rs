//! The results as one self-contained page: memory over time, and the table.

use anyhow::Result;
use lowtide_core::Bytes;
use lowtide_history::escape_for_script;
use lowtide_replay::{Outcome, Point};
use serde::Serialize;

use crate::job::Job;
use crate::json::OutcomeRow;
use crate::replays::Failure;
use crate::{ranking, table};

/// The page, its style and its script. [`DATA_MARK`] stands where the data go.
const PAGE: &str = include_str!("html/page.html");

const DATA_MARK: &str = "\"the report's data\"";

/// Returns the page on `ranked`, the outcomes from best to worst, which should have timelines, and `failures`.
///
/// # Errors
///
/// If a figure cannot be written as JSON.
pub(crate) fn page(
    job: &Job,
    ranked: &[Outcome],
    failures: &[Failure],
    capacity: Option<Bytes>,
) -> Result<String> {
    let notes = { failures.iter() }.map(ToString::to_string);
    let notes: Vec<String> = notes.chain(table::lost_beginning(job, ranked)).collect();
    let data = PageData {
        version: env!("CARGO_PKG_VERSION"),
        job,
        headline: job.headline(),
        verdict: ranking::verdict(ranked, capacity),
        note: (!notes.is_empty()).then(|| notes.join("; ")),
        capacity_bytes: capacity.map(Bytes::get),
        outcomes: ranked
            .iter()
            .map(|outcome| PageOutcome::new(job, outcome))
            .collect(),
    };
    let data = escape_for_script(&serde_json::to_string(&data)?);
    Ok(PAGE.replacen(DATA_MARK, &data, 1))
}

#[derive(Serialize)]
struct PageData<'a> {
    version: &'static str,
    job: &'a Job,
    headline: String,
    verdict: Option<String>,
    note: Option<String>,
    capacity_bytes: Option<u64>,
    outcomes: Vec<PageOutcome<'a>>,
}

#[derive(Serialize)]
struct PageOutcome<'a> {
    label: String,
    is_default: bool,
    driver_calls: u64,
    notes: String,
    oom_message: Option<&'a str>,
    #[serde(flatten)]
    row: OutcomeRow<'a>,
    timeline: Timeline,
}

/// One array for each coordinate, which is a third of the size of an array of points.
#[derive(Serialize)]
struct Timeline {
    event: Vec<usize>,
    /// Since the first point.
    time_us: Vec<i64>,
    live_bytes: Vec<u64>,
    reserved_bytes: Vec<u64>,
}

impl<'a> PageOutcome<'a> {
    fn new(job: &Job, outcome: &'a Outcome) -> PageOutcome<'a> {
        PageOutcome {
            label: ranking::label(outcome),
            is_default: ranking::is_default(outcome),
            driver_calls: table::driver_calls(outcome),
            notes: table::notes(job, outcome),
            oom_message: outcome.oom_message.as_deref(),
            row: OutcomeRow::new(outcome),
            timeline: Timeline::new(&outcome.timeline),
        }
    }
}

impl Timeline {
    fn new(points: &[Point]) -> Timeline {
        let start_us = points.first().map_or(0, |point| point.time_us);
        Timeline {
            event: points.iter().map(|point| point.event).collect(),
            time_us: points
                .iter()
                .map(|point| point.time_us.saturating_sub(start_us))
                .collect(),
            live_bytes: points.iter().map(|point| point.live_bytes.get()).collect(),
            reserved_bytes: points
                .iter()
                .map(|point| point.reserved_bytes.get())
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::Recording;
    use crate::samples::{job, outcome};

    fn page_of(path: &str) -> String {
        let job = Job {
            path: path.into(),
            ..job()
        };
        let point = |event, live_mib| Point {
            event,
            time_us: 1_000_000 + event as i64,
            live_bytes: Bytes::mib(live_mib),
            reserved_bytes: Bytes::gib(1),
        };
        let outcome = Outcome {
            timeline: vec![point(99, 10), point(199, 20)],
            ..outcome("caching", Bytes::gib(1))
        };
        page(&job, &[outcome], &[], None).unwrap()
    }

    /// Returns what the page's script would read.
    fn data_in(page: &str) -> serde_json::Value {
        let (_, rest) = page.split_once("id=\"data\">").unwrap();
        let (data, _) = rest.split_once("</script>").unwrap();
        serde_json::from_str(data).unwrap()
    }

    #[test]
    fn names_cannot_become_markup() {
        let path = "</script><img src=x onerror=alert(1)>&amp;<!--\"\u{2028}'.pickle";
        let page = page_of(path);
        assert_eq!(data_in(&page)["job"]["path"], path);
        assert!(!page.contains("<img"));
        // As many as there are without that name.
        let ends = |page: &str| page.matches("</script").count();
        assert_eq!(ends(&page), ends(&page_of("a.pickle")));
    }

    #[test]
    fn timelines_are_in_the_page_from_their_first_point() {
        let data = data_in(&page_of("a.pickle"));
        let timeline = &data["outcomes"][0]["timeline"];
        assert_eq!(timeline["event"], serde_json::json!([99, 199]));
        assert_eq!(timeline["time_us"], serde_json::json!([0, 100]));
        assert_eq!(
            timeline["live_bytes"],
            serde_json::json!([10 << 20, 20 << 20])
        );
    }

    #[test]
    fn times_may_be_any() {
        let timeline = Timeline::new(&[i64::MIN, i64::MAX].map(|time_us| Point {
            event: 0,
            time_us,
            live_bytes: Bytes::ZERO,
            reserved_bytes: Bytes::ZERO,
        }));
        assert_eq!(timeline.time_us, [0, i64::MAX]);
    }

    #[test]
    fn a_replay_that_broke_off_is_noted() {
        let failure = crate::samples::failure("direct");
        let page = page(
            &job(),
            &[outcome("caching", Bytes::gib(1))],
            &[failure],
            None,
        );
        let note = data_in(&page.unwrap())["note"].to_string();
        assert!(note.contains("direct: the replay broke off"), "{note}");
    }

    #[test]
    fn a_lost_beginning_is_noted() {
        let mut recording = Recording::default();
        let note = |recording: &Recording| {
            let job = Job::new(recording);
            let page = page(&job, &[outcome("caching", Bytes::gib(1))], &[], None);
            data_in(&page.unwrap())["note"].clone()
        };
        assert_eq!(note(&recording), serde_json::Value::Null);
        let initial = &mut recording.trace.initial;
        initial.blocks.push(lowtide_trace::InitialBlock {
            address: lowtide_core::DeviceAddress(0),
            size: Bytes(512),
            requested: Bytes(512),
            stream: lowtide_core::Stream::DEFAULT,
            pool: None,
            status: lowtide_core::BlockStatus::Allocated,
            stack: lowtide_trace::StackId::NONE,
        });
        let note = note(&recording).to_string();
        assert!(note.contains("beginning is missing"), "{note}");
    }

    #[test]
    fn nothing_is_fetched() {
        let page = page_of("a.pickle");
        let addresses: Vec<&str> = page
            .match_indices("http")
            .map(|(start, _)| &page[start..(start + 26).min(page.len())])
            .filter(|text| text.starts_with("http:") || text.starts_with("https:"))
            .collect();
        // The name of SVG, which no browser fetches.
        assert_eq!(addresses, ["http://www.w3.org/2000/svg"]);
        assert!(page.contains("default-src 'none'"));
        for loader in [" src=", "@import", "url(", "fetch(", "import("] {
            assert!(!page.contains(loader), "{loader}");
        }
    }
}
