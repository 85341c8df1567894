//! The small part of a report's data: names, main figures, texts.

use lowtide_core::{Bytes, Cause};
use lowtide_trace::RecordedText;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::growth::{Growth, Leaks, Site, StepSource, TrainingState, Trend};
use crate::history::Moment;
use crate::page::fold::FoldedBlocks;
use crate::page::frames::Frames;

/// The most call sites that are listed for growth at many sites.
const SPREAD_SITES: usize = 10;

/// The part of the data that the page reads first. The names of the keys are an interface to the page's script.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    pub(super) version: &'static str,
    pub(super) traces: Vec<TraceSummary>,
    /// The texts that columns refer to by number.
    pub(super) strings: Vec<RecordedText>,
}

/// The summary of one trace.
#[derive(Debug, Serialize)]
pub(super) struct TraceSummary {
    pub(super) name: String,
    /// `None` for pinned host memory.
    pub(super) device: Option<u32>,
    pub(super) events: u32,
    pub(super) duration_us: Option<u64>,
    pub(super) has_stacks: bool,
    /// The job's `PYTORCH_CUDA_ALLOC_CONF`.
    pub(super) settings: RecordedText,
    /// The allocator with the settings in force; empty for pinned host memory.
    pub(super) strategy: String,
    /// `verified` or `estimated`.
    pub(super) sizes: &'static str,
    pub(super) main_stream: u32,
    /// The size of the pages of large expandable segments.
    pub(super) large_page: u64,
    pub(super) streams: Vec<String>,
    pub(super) pools: Vec<String>,
    /// For each pool, the tag of the region whose memory it holds; empty if there is none.
    pub(super) pool_regions: Vec<RecordedText>,
    pub(super) tags: Vec<String>,
    /// The names of the categories, by the numbers of blocks; none if nothing shows categories.
    pub(super) categories: Vec<&'static str>,
    /// The paths of modules with `*` for numbers, by the numbers of blocks; the first is that of no module.
    pub(super) modules: Vec<String>,
    /// The tags of regions that were paused.
    pub(super) regions: Vec<String>,
    pub(super) bucket_events: u64,
    pub(super) peak_live: Peak,
    pub(super) peak_reserved: Peak,
    /// The peak paused bytes.
    pub(super) peak_paused: u64,
    /// `None` unless the job ran under `tide`.
    pub(super) frames: Option<Frames>,
    pub(super) ooms: Vec<Oom>,
    pub(super) instants: Vec<Instant>,
    pub(super) aggregated: Option<FoldedBlocks>,
    pub(super) strategies: Vec<StrategySummary>,
    /// Notes on the replays.
    pub(super) replay_notes: Vec<String>,
    pub(super) growth: GrowthSummary,
    pub(super) initial_blocks: usize,
    pub(super) is_cut_off: bool,
    /// The least number of events after the last one, while the snapshot was taken.
    pub(super) missed_events: u64,
    pub(super) skipped_events: u64,
    pub(super) contradictions: u64,
}

/// The maximum of a curve.
#[derive(Debug, Serialize)]
pub(super) struct Peak {
    event: u32,
    bytes: u64,
}

/// A request that ended in an out-of-memory error.
#[derive(Debug, Serialize)]
pub(super) struct Oom {
    pub(super) event: u32,
    pub(super) requested: u64,
    /// The number of its stream.
    pub(super) stream: u32,
    pub(super) device_free: u64,
    /// The largest free block of its stream and pool. Known for the first refusals only.
    pub(super) largest_free: Option<u64>,
}

/// The exact figures of an instant.
#[derive(Debug, Serialize)]
pub(super) struct Instant {
    event: u32,
    label: String,
    live: u64,
    reserved: u64,
    requested: u64,
    paused: u64,
    stream: u32,
    causes: Causes,
}

#[derive(Debug)]
struct Causes([Bytes; Cause::ALL.len()]);

/// The job's memory under another strategy.
#[derive(Debug, Serialize)]
pub(super) struct StrategySummary {
    pub(super) label: String,
    pub(super) peak_reserved_bytes: u64,
    pub(super) ratio: f64,
    /// The time that the driver's calls would take.
    pub(super) driver_time_us: f64,
    pub(super) completed: bool,
}

/// The growth over a job's steps.
#[derive(Debug, Default, Serialize)]
pub(super) struct GrowthSummary {
    steps: usize,
    /// The reason why leaks cannot be told from other growth, as a sentence.
    doubt: Option<String>,
    training: TrainingState,
    /// `annotation`, `period`, or `parts` if no steps were found.
    found_by: &'static str,
    annotation: Option<String>,
    warm_up_steps: usize,
    /// The number of steps that are treated as one.
    span_steps: usize,
    leaks: Vec<GrownSummary>,
    spread: Option<SpreadSummary>,
}

/// A call site with more live bytes in the last step than after the first ones.
#[derive(Debug, Serialize)]
pub(super) struct GrownSummary {
    #[serde(flatten)]
    trend: Trend,
    #[serde(flatten)]
    site: SiteSummary,
}

/// The growth that belongs to no single call site.
#[derive(Debug, Serialize)]
pub(super) struct SpreadSummary {
    #[serde(flatten)]
    trend: Trend,
    is_steady: bool,
    /// The number of call sites that it is spread over.
    sites: usize,
    /// Those that grew most.
    most: Vec<GrownSummary>,
}

/// A call site: the number of a stack, or a size and the number of a stream.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum SiteSummary {
    Stack { stack: u32 },
    Size { size_max: u64, stream: u32 },
}

impl GrowthSummary {
    /// Returns the summary of `found`. `site_of` returns the page's name of a call site.
    pub(super) fn new(
        found: &Leaks,
        mut site_of: impl FnMut(Site) -> SiteSummary,
    ) -> GrowthSummary {
        let (found_by, annotation) = match &found.steps.source {
            StepSource::Annotation(name) => ("annotation", Some(name.raw().to_owned())),
            StepSource::Period(_) => ("period", None),
            StepSource::Parts => ("parts", None),
        };
        let mut grown = |growth: &Growth| GrownSummary {
            trend: growth.trend,
            site: site_of(growth.site),
        };
        GrowthSummary {
            steps: found.steps.len(),
            doubt: found.doubt.map(|doubt| doubt.to_string()),
            training: found.training,
            found_by,
            annotation,
            warm_up_steps: found.warm_up_steps,
            span_steps: found.span_steps,
            leaks: found.leaks().map(&mut grown).collect(),
            spread: found.spread.map(|trend| SpreadSummary {
                trend,
                is_steady: trend.is_steady(),
                sites: found.others().count(),
                most: found.others().take(SPREAD_SITES).map(grown).collect(),
            }),
        }
    }
}

impl Peak {
    pub(super) fn new(moment: &Moment, bytes: Bytes) -> Peak {
        Peak {
            event: moment.instant,
            bytes: bytes.get(),
        }
    }
}

impl Instant {
    pub(super) fn new(label: &str, moment: &Moment, stream: u32) -> Instant {
        Instant {
            event: moment.instant,
            label: label.to_owned(),
            live: moment.fragmentation.live.get(),
            reserved: moment.fragmentation.reserved.get(),
            requested: moment.requested.get(),
            paused: moment.paused.get(),
            stream,
            causes: Causes(moment.fragmentation.causes),
        }
    }
}

impl Serialize for Causes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (cause, bytes) in Cause::ALL.iter().zip(self.0) {
            map.serialize_entry(cause.name(), &bytes.get())?;
        }
        map.end()
    }
}
