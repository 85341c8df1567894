//! Runs everything that lowtide does with a recording, on any file's bytes. Shared by `tests/mutated.rs` and the
//! fuzz target `snapshot`.

#[path = "changes.rs"]
mod changes;

use std::io;

use changes::check_changes;
use lowtide_core::{Bytes, Config, MempoolId, StrategyName};
use lowtide_history::{
    BlockSizes, Categories, Category, Difference, History, Leaks, PageData, PageTrace,
};
use lowtide_replay::{Job, Options, Outcome};
use lowtide_trace::{OneLine, Snapshot, Trace, TraceError, read_from, write_compact, write_pickle};

/// The result for a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Made {
    /// The file is refused, in one line.
    Refused,
    /// The file is a recording of this many devices.
    Recording(usize),
}

/// Reads `bytes`, and does everything with the recording that lowtide can: the page, leaks, a difference, replays,
/// and files that read back.
///
/// # Panics
///
/// If a step panics, a strategy fails, or a written file does not read back.
pub(crate) fn make_everything(bytes: &[u8]) -> Made {
    let snapshot = match read_from(bytes) {
        Ok(snapshot) => snapshot,
        Err(error) => {
            check_line(&error.to_string());
            return Made::Refused;
        }
    };
    for trace in &snapshot.traces {
        let replayed = replay(trace);
        show(trace, &replayed);
        let half = trace.last_events(trace.events.len() / 2);
        half.expect("the end of what can be read can be read");
    }
    write(&snapshot);
    Made::Recording(snapshot.traces.len())
}

/// Replays with every strategy, and verifies.
fn replay(trace: &Trace) -> Vec<(String, Outcome)> {
    let job = Job::new(trace);
    let options = Options {
        timeline_points: 50,
        ..Options::default()
    };
    let configs = { StrategyName::ALL.into_iter() }
        .map(StrategyName::as_str)
        .chain(["caching:expandable_segments:True"]);
    let replayed = configs.map(|name| {
        let config: Config = name.parse().expect("a configuration");
        let outcome = job.replay(&config, &options, &());
        let outcome = outcome.unwrap_or_else(|error| panic!("{name}: {error}"));
        (name.to_owned(), outcome)
    });
    let replayed = replayed.collect();
    let (config, _) = trace.config_as_understood();
    for capacity in [None, Some(trace.peak_live_bytes().max(Bytes::mib(2)))] {
        let options = Options {
            capacity,
            verify: true,
            timeline_points: 0,
        };
        // A recording of another allocator may differ from PyTorch's.
        if let Err(error) = job.replay(&Config::Caching(config.clone()), &options, &()) {
            check_line(&error.to_string());
        }
    }
    replayed
}

/// Makes the page of `lowtide report`, and the data that `summary`, `leaks` and `diff` print.
fn show(trace: &Trace, replayed: &[(String, Outcome)]) {
    let sizes = BlockSizes::of(trace, &());
    let history = History::new(trace, &sizes);
    check_changes(&history);
    let peak = &history.peak_live;
    let held = Categories::of(trace, &history).held_at(&history, peak.instant);
    let held: u64 = Category::ALL
        .map(|category| held[category].bytes)
        .iter()
        .sum();
    assert_eq!(
        held,
        peak.fragmentation.live.get(),
        "each block has a category"
    );
    let leaks = Leaks::find(trace, &history);
    let difference = Difference::new([(trace, &history), (trace, &history)]);
    let grown = { difference.sites.iter() }.map(|site| site.growth_bytes());
    assert_eq!(grown.max().unwrap_or(0), 0, "nothing grew between equals");
    let replayed = replayed.iter();
    let replayed: Vec<_> = replayed
        .map(|(name, outcome)| (name.clone(), outcome))
        .collect();
    let mut page = PageData::new("0");
    page.add(&PageTrace {
        name: "mutated",
        trace,
        is_host: false,
        sizes: &sizes,
        history: &history,
        replayed: &replayed,
        replay_notes: &[],
        leaks: &leaks,
        is_cut_off: false,
        lengths: &[],
    });
    page.write_page(&mut io::sink())
        .expect("a sink takes everything");
}

/// Writes both formats, and reads the files.
fn write(snapshot: &Snapshot) {
    let mut pickle = Vec::new();
    match write_pickle(snapshot, &mut pickle) {
        Ok(()) => check_same(snapshot, read_from(&pickle[..]), "pickle"),
        // A PyTorch snapshot has one set of settings.
        Err(error) => assert!(snapshot.traces.len() > 1, "{error}"),
    }
    let mut compact = Vec::new();
    match write_compact(snapshot, &mut compact) {
        Ok(()) => check_same(snapshot, read_from(&compact[..]), "lowtide's own format"),
        // Two gathered snapshots may be of one device, or of the host.
        Err(error) => assert!(snapshot.traces.len() + snapshot.host.len() > 1, "{error}"),
    }
}

fn check_same(snapshot: &Snapshot, again: Result<Snapshot, TraceError>, format: &str) {
    let again = again.unwrap_or_else(|error| panic!("{format}: {error}"));
    let used = |snapshot: &Snapshot| -> Vec<Trace> {
        let traces = snapshot.traces.iter();
        traces.filter(|trace| trace.is_used()).cloned().collect()
    };
    let (before, after) = (used(snapshot), used(&again));
    assert_eq!(before.len(), after.len(), "{format}: devices");
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(before.device, after.device, "{format}");
        // A written file has the pools of more events, from which those of others are inferred.
        let pools = || before.events.iter().map(|recorded| recorded.pool_known);
        let events = |trace: &Trace| -> Vec<_> {
            let events = trace.events.iter().zip(pools());
            events
                .map(|(recorded, is_known)| {
                    let mut event = recorded.event;
                    event.pool = if is_known {
                        event.pool
                    } else {
                        MempoolId::DEFAULT
                    };
                    (event, recorded.time_us)
                })
                .collect()
        };
        assert_eq!(before.events.len(), after.events.len(), "{format}");
        check_equal(&events(before), &events(after), format);
        check_equal(&before.segments, &after.segments, format);
        assert_eq!(before.regions, after.regions, "{format}: regions");
        assert_eq!(before.annotations, after.annotations, "{format}: marks");
        // A snapshot has PyTorch's options only where they were in force.
        if before.settings.is_of_caching() || before.settings.strategy_name().is_none() {
            assert_eq!(before.settings.conf, after.settings.conf, "{format}");
        } else {
            let (before, after) = (&before.settings.strategy, &after.settings.strategy);
            assert_eq!(before, after, "{format}");
        }
    }
}

fn check_equal<T: PartialEq + std::fmt::Debug>(before: &[T], after: &[T], format: &str) {
    for (index, (before, after)) in before.iter().zip(after).enumerate() {
        assert_eq!(before, after, "{format}: number {index}");
    }
    assert_eq!(before.len(), after.len(), "{format}");
}

fn check_line(text: &str) {
    assert_eq!(OneLine(text).to_string(), text, "an error is one line");
    assert!(text.len() < 2000, "an error is short: {text}");
}
