//! Explains why a request ran out of memory, and which settings would have served it.
//!
//! A [`Shortfall`] is the allocator's state when a request failed. [`Shortfall::explain`] returns the lines that
//! follow the error's first line:
//!
//! - the reserved bytes that are not live, by cause;
//! - the private pools that keep some of them;
//! - the other settings under which the same events would have left room for the request.
//!
//! The settings are not guessed: the last events are replayed on the simulator under each of them, as by the command
//! `lowtide replay`. If the settings in use also serve the request in a replay, the replays prove
//! nothing, and no setting is named.
#![forbid(unsafe_code)]

mod candidates;
mod pools;

use std::cmp::Reverse;
use std::fmt;
use std::time::{Duration, Instant};

use lowtide_core::{
    Action, Bytes, Cause, Config, Count, DeviceAddress, Event, Fragmentation, FreeBlockOrder,
    KeptPool, MempoolId, SegmentSnapshot, Stream,
};
use lowtide_replay::{Job, Options};
use lowtide_trace::Trace;

pub use candidates::Configured;
use pools::PoolShare;

/// The state of an allocator when a request failed.
#[derive(Clone, PartialEq, Debug)]
pub struct Shortfall {
    /// The device's number.
    pub device: u32,
    /// The bytes that the program requested.
    pub requested: Bytes,
    /// The request's stream.
    pub stream: Stream,
    /// The request's pool.
    pub pool: MempoolId,
    /// The most bytes that the process could reserve.
    pub capacity: Bytes,
    /// Whether the job set a limit of its own. Without one, no garbage is collected.
    pub is_limited: bool,
    /// The free bytes of the device that the memory margin of regions leaves to other processes; `None` unless the
    /// margin alone refused the request.
    pub kept_by_margin: Option<Bytes>,
    /// The strategy and options that served the job.
    pub config: Config,
    /// Which of several free blocks of one size is taken, if `config` does not say.
    pub free_block_order: Option<FreeBlockOrder>,
    /// Where the user would change the settings.
    pub configured: Configured,
    /// The segments reserved from the driver, by address.
    pub segments: Vec<SegmentSnapshot>,
    /// The private pools that keep their free memory.
    pub kept_pools: Vec<KeptPool>,
    /// The last events, oldest first, up to the state in `segments`; empty if no events were kept.
    pub events: Vec<Event>,
}

/// Why a request failed: the lines that follow the error's first line.
#[derive(Clone, PartialEq, Debug)]
pub struct Explanation {
    fragmentation: Fragmentation,
    capacity: Bytes,
    pools: Vec<PoolShare>,
    verdict: Verdict,
}

/// What the replays under other settings found.
#[derive(Clone, PartialEq, Debug)]
enum Verdict {
    /// The margin of regions refused the request. It keeps these bytes free.
    Margin(Bytes),
    /// Live bytes and the request together exceed the capacity by these bytes.
    TooMuchLive(Bytes),
    /// Other settings were replayed.
    Tried(Trial),
    /// The kept state is not enough for an answer, for this reason.
    Unknown(String),
}

/// The results of replays under other settings.
#[derive(Clone, PartialEq, Default, Debug)]
struct Trial {
    /// The number of events replayed; with 0, the replay only allocated anew what was held.
    events: usize,
    /// The settings that served the request, and the peak reserved bytes of each.
    fitting: Vec<(String, Bytes)>,
    /// The number of settings that did not serve it.
    failing: usize,
    /// The number of settings that were not replayed for lack of time.
    untried: usize,
    /// The number of replays that broke off. They say nothing about their settings.
    broken: usize,
}

impl Trial {
    /// Returns the verdict. Replays that broke off and replays that did not begin are no evidence.
    fn verdict(self) -> Verdict {
        match (self.fitting.len() + self.failing, self.broken) {
            (0, 0) => Verdict::Unknown("there was no time to try other settings".into()),
            (0, _) => Verdict::Unknown("no replay under other settings came to its end".into()),
            _ => Verdict::Tried(self),
        }
    }
}

impl Shortfall {
    /// Returns why the request failed. No replay begins after `budget` has passed. Each replay takes about a
    /// microsecond per event and per block that was held before the first event; that of `tide` also a few microseconds
    /// per 2 MiB of the peak.
    pub fn explain(self, budget: Duration) -> Explanation {
        let fragmentation =
            Fragmentation::of(&self.segments, self.stream, self.config.large_page());
        let others = self.kept_pools.iter().filter(|pool| pool.id != self.pool);
        let pools = pools::shares_of(others, &self.segments);
        let capacity = self.capacity;
        let needed = fragmentation.live.saturating_add(self.requested);
        let verdict = match (self.kept_by_margin, needed.saturating_sub(capacity)) {
            // Replays have no margin, and other settings do not change it.
            (Some(kept), _) => Verdict::Margin(kept),
            (None, Bytes::ZERO) => self.replay(budget),
            (None, excess) => Verdict::TooMuchLive(excess),
        };
        Explanation {
            fragmentation,
            capacity,
            pools,
            verdict,
        }
    }

    fn replay(self, budget: Duration) -> Verdict {
        let start = Instant::now();
        let options = Options {
            capacity: Some(self.capacity),
            ..Options::default()
        };
        if budget.is_zero() {
            let reason = "the requests that failed before took the time there is for that";
            return Verdict::Unknown(reason.into());
        }
        let in_effect = |config: &Config| candidates::in_effect(config, self.is_limited);
        let running = in_effect(&self.config);
        let mut candidates = candidates::of(&self.config, self.configured);
        for (_, config) in &mut candidates {
            *config = in_effect(config);
        }
        // A replay lends less of a pool than a job does with pages, so such a replay would run out of memory.
        let lends = self.kept_pools.iter().any(|pool| pool.use_on_oom);
        candidates
            .retain(|(_, config)| *config != running && !(lends && candidates::maps_pages(config)));
        let running = ("the settings in use".to_owned(), running);
        let mut trial = Trial {
            events: self.events.len(),
            ..Trial::default()
        };
        let trace = match self.into_trace() {
            Ok(trace) => trace,
            Err(error) => return Verdict::Unknown(error.to_string()),
        };
        let job = Job::new(&trace);
        for (index, (label, config)) in [running].into_iter().chain(candidates).enumerate() {
            if start.elapsed() > budget {
                trial.untried += 1;
                continue;
            }
            match job.replay(&config.in_job(), &options, &()) {
                Ok(outcome) if outcome.completed && index == 0 => {
                    return Verdict::Unknown(contradiction(&trace));
                }
                Ok(outcome) if outcome.completed => {
                    trial.fitting.push((label, outcome.peak_reserved_bytes));
                }
                // The settings in use are known to fail.
                Ok(_) => trial.failing += usize::from(index > 0),
                // If the settings in use cannot be replayed, replays of others are no evidence.
                Err(error) if index == 0 => return Verdict::Unknown(error.to_string()),
                Err(_) => trial.broken += 1,
            }
        }
        trial.verdict()
    }

    /// Returns the events as a recording that ends in the failed request. Earlier requests that failed are left
    /// out, because the program went on without them.
    fn into_trace(self) -> Result<Trace, lowtide_trace::TraceError> {
        let request = Event {
            action: Action::OutOfMemory,
            pool: self.pool,
            address: DeviceAddress::NULL,
            size: self.requested,
            stream: self.stream,
        };
        let events = self.events.into_iter();
        let events = events
            .filter(|event| event.action != Action::OutOfMemory)
            .chain([request]);
        let mut trace = Trace::recovered(self.device, events, self.segments)?;
        trace.settings.free_block_order = self.free_block_order;
        Ok(trace)
    }
}

/// Returns why the replays are no evidence: under the settings in use, a replay serves the request that failed.
fn contradiction(trace: &Trace) -> String {
    let is_whole_past = trace.initial.segments.is_empty();
    let before = if is_whole_past {
        ""
    } else {
        "what came before, "
    };
    let replayed = match trace.events.len().saturating_sub(1) {
        0 => "what is held, placed anew, leaves room for the request".to_owned(),
        events => {
            let which = if is_whole_past { "all" } else { "the last" };
            let events = Count(events as u64);
            format!("a replay of {which} {events} events serves the request")
        }
    };
    format!(
        "{replayed} with the settings in use, too: something that a replay does not know is in the way, such as \
         {before}a capture, a memory pool, a margin or another process"
    )
}

/// Writes two or three lines, without a line break at the end.
impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_fragmentation(f)?;
        pools::fmt(&self.pools, f)?;
        writeln!(f)?;
        match &self.verdict {
            Verdict::Margin(kept) => write!(
                f,
                "Would have fitted: with a lower margin. Of what is free on the device, regions leave {kept} to \
                 others (lowtide_set_memory_margin, or memory_margin_bytes of torch_memory_saver)."
            ),
            Verdict::TooMuchLive(excess) => write!(
                f,
                "Would have fitted: nothing. What is live and this request are {excess} more than the \
                 {} there are for this process.",
                self.capacity
            ),
            Verdict::Unknown(reason) => write!(f, "Would have fitted: not known, as {reason}."),
            Verdict::Tried(trial) => trial.fmt(f),
        }
    }
}

impl Explanation {
    fn fmt_fragmentation(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fragmentation { reserved, live, .. } = self.fragmentation;
        write!(
            f,
            "Reserved and not live: {} of {reserved}",
            reserved.saturating_sub(live)
        )?;
        let causes = Cause::ALL.map(|cause| (self.fragmentation.of_cause(cause), cause));
        let mut causes: Vec<_> = { causes.into_iter() }
            .filter(|(bytes, _)| !bytes.is_zero())
            .collect();
        causes.sort_unstable_by_key(|&(bytes, cause)| (Reverse(bytes), cause));
        for (index, &(bytes, cause)) in causes.iter().enumerate() {
            let before = if index == 0 { ": " } else { ", " };
            write!(f, "{before}{bytes} {}", words(cause))?;
        }
        write!(f, ".")
    }
}

/// Returns the words for a cause, to be written after its bytes.
fn words(cause: Cause) -> &'static str {
    match cause {
        Cause::Rounding => "in rounding",
        Cause::WaitingForEvents => "freed but waiting for other streams",
        Cause::PrivatePools => "free in private pools",
        Cause::OtherStreams => "free for other streams only",
        Cause::CachedSegments => "in segments that are wholly free",
        Cause::PartlyUsedPages => "free on pages that are partly used",
        Cause::SplitRemainders => "free between blocks of segments in use",
    }
}

impl fmt::Display for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.events {
            0 => write!(f, "Would have fitted, what is held placed anew: ")?,
            events => {
                let events = Count(events as u64);
                write!(
                    f,
                    "Would have fitted, by a replay of the last {events} events: "
                )?;
            }
        }
        if self.fitting.is_empty() {
            write!(f, "nothing")?;
        }
        for (index, (label, reserved)) in self.fitting.iter().enumerate() {
            let before = if index == 0 { "" } else { ", " };
            write!(f, "{before}{label} ({reserved} reserved)")?;
        }
        match (self.failing, self.fitting.is_empty()) {
            (0, _) => {}
            (failing, true) => write!(f, " of {failing} tried")?,
            (1, false) => write!(f, "; one other not")?,
            (failing, false) => write!(f, "; {failing} others not")?,
        }
        if self.broken > 0 {
            write!(f, "; {} could not be replayed", self.broken)?;
        }
        if self.untried > 0 {
            write!(f, "; no time for {} more", self.untried)?;
        }
        write!(f, ".")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replays_that_break_off_show_nothing() {
        for (failing, broken, is_known) in [(0, 0, false), (0, 3, false), (1, 3, true)] {
            let trial = Trial {
                failing,
                broken,
                ..Trial::default()
            };
            let verdict = trial.verdict();
            assert_eq!(
                matches!(verdict, Verdict::Tried(_)),
                is_known,
                "{verdict:?}"
            );
        }
    }
}
