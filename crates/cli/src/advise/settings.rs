//! The settings of PyTorch's allocator that are worth trying, with their requirements.

use std::collections::HashSet;
use std::fmt;

use lowtide_core::{Action, Bytes, Config};
use lowtide_trace::{RecordedStr, RecordedText, Trace, conf_pairs};

/// The keys of `PYTORCH_CUDA_ALLOC_CONF` that a search sets or leaves at their defaults.
const SEARCHED_KEYS: [&str; 6] = [
    "expandable_segments",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "roundup_power2_divisions",
];

/// One setting that differs from PyTorch's default.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Setting {
    ExpandableSegments,
    RoundupPower2Divisions(u64),
    MaxSplitSizeMib(u64),
    LargeSegmentSizeMib(u64),
    GarbageCollectionThreshold(f64),
}

impl Setting {
    /// Returns what a user has to know before choosing this setting; empty if it works everywhere.
    pub(crate) fn cautions(self) -> &'static [&'static str] {
        match self {
            Setting::ExpandableSegments => &[
                "expandable_segments needs torch 2.1 and Linux",
                "tensors are then shared between processes by file descriptors, which containers may \
                 refuse",
                "memory pools with an allocator of their own do without it",
            ],
            Setting::LargeSegmentSizeMib(_) => &["large_segment_size_mb needs torch 2.11"],
            Setting::GarbageCollectionThreshold(_) => &[
                "garbage_collection_threshold acts only below a limit, that of \
                 torch.cuda.set_per_process_memory_fraction",
            ],
            Setting::RoundupPower2Divisions(_) | Setting::MaxSplitSizeMib(_) => &[],
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Setting::ExpandableSegments => f.write_str("expandable_segments:True"),
            Setting::RoundupPower2Divisions(steps) => write!(f, "roundup_power2_divisions:{steps}"),
            Setting::MaxSplitSizeMib(mib) => write!(f, "max_split_size_mb:{mib}"),
            Setting::LargeSegmentSizeMib(mib) => write!(f, "large_segment_size_mb:{mib}"),
            Setting::GarbageCollectionThreshold(share) => {
                write!(f, "garbage_collection_threshold:{share}")
            }
        }
    }
}

/// The values to try of each setting that can be combined with others: of rounding, segment sizes, split sizes and
/// garbage collection.
#[derive(Debug)]
pub(crate) struct Axes([Vec<Setting>; 4]);

impl Axes {
    /// Returns the values that are worth trying for the job in `trace`.
    pub(crate) fn new(trace: &Trace, has_limit: bool) -> Axes {
        let thresholds: &[f64] = if has_limit { &[0.6, 0.8, 0.9] } else { &[] };
        let (split_sizes, thresholds) = (split_sizes_mib(trace).into_iter(), thresholds.iter());
        Axes([
            [2, 4, 8, 16].map(Setting::RoundupPower2Divisions).to_vec(),
            [12, 32, 64, 128].map(Setting::LargeSegmentSizeMib).to_vec(),
            split_sizes.map(Setting::MaxSplitSizeMib).collect(),
            { thresholds.copied() }
                .map(Setting::GarbageCollectionThreshold)
                .collect(),
        ])
    }

    /// Returns the axes that can be combined with `base`.
    ///
    /// Garbage collection ignores expandable segments. With max_split_size_mb, expandable segments are known to
    /// grow without bound in some jobs (pytorch#123548), so a good result in one recording proves little.
    pub(crate) fn combinable_with(&self, base: &[Setting]) -> &[Vec<Setting>] {
        if base.contains(&Setting::ExpandableSegments) {
            &self.0[..2]
        } else {
            &self.0
        }
    }
}

/// Returns up to five values in MiB for `max_split_size_mb`: PyTorch's least, and four sizes spread evenly over the
/// job's own large requests. Empty if the job has no such requests.
fn split_sizes_mib(trace: &Trace) -> Vec<u64> {
    const LEAST_MIB: u64 = 20;
    const OWN_SIZES: usize = 4;
    let requests = trace.events.iter().map(|recorded| recorded.event);
    let mut sizes: Vec<u64> = requests
        .filter(|event| event.action == Action::Alloc && event.size > Bytes::mib(LEAST_MIB))
        .map(|event| event.size.get() >> 20)
        .collect();
    sizes.sort_unstable();
    sizes.dedup();
    let own =
        (1..=OWN_SIZES).filter_map(|part| sizes.get((sizes.len() * part / OWN_SIZES).max(1) - 1));
    let mut chosen: Vec<u64> = own.copied().collect();
    if !chosen.is_empty() {
        chosen.insert(0, LEAST_MIB);
    }
    chosen.dedup();
    chosen
}

/// A value of `PYTORCH_CUDA_ALLOC_CONF`.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Candidate {
    /// The settings that the search chose. Fewer settings are simpler.
    pub(crate) settings: Vec<Setting>,
    /// The text of the value. Parts of it may come from the recording.
    pub(crate) conf: RecordedText,
    /// The configuration that it means.
    pub(crate) config: Config,
}

impl Candidate {
    /// Returns `settings` together with `kept`; `None` if PyTorch refuses the combination.
    pub(crate) fn new(settings: Vec<Setting>, kept: &Kept<'_>) -> Option<Candidate> {
        let mut pairs: Vec<String> = settings.iter().map(Setting::to_string).collect();
        pairs.extend_from_slice(&kept.understood);
        let conf = pairs.join(",");
        let config = Config::parse("caching", &conf).ok()?;
        Some(Candidate {
            settings,
            conf: conf.into(),
            config,
        })
    }
}

/// The recorded `key:value` pairs that the search does not change.
#[derive(Default, Debug)]
pub(crate) struct Kept<'a> {
    /// Pairs that lowtide understands, without white space. They are proposed again.
    understood: Vec<String>,
    /// Pairs that lowtide understands, with characters that no option needs. They are not proposed again.
    pub(crate) strange: Vec<RecordedStr<'a>>,
    /// Pairs that lowtide does not understand. Replays and proposals leave them out.
    unknown: Vec<RecordedStr<'a>>,
}

impl<'a> Kept<'a> {
    /// Returns the pairs to keep of the settings that the process began with, according to `trace`.
    pub(crate) fn new(trace: &'a Trace) -> Kept<'a> {
        let (_, others) = trace.config_as_understood();
        let others: HashSet<RecordedStr<'_>> = others.into_iter().collect();
        // PyTorch would refuse lowtide's own options.
        let ours = ["free_block_order", "search_after_wait"];
        let is_ours = |pair: &&str| ours.contains(&&*key_of(pair));
        let kept = conf_pairs(trace.settings.conf.raw())
            .filter(|pair| !is_searched(pair) && !is_ours(pair));
        let mut sorted = Kept::default();
        for pair in kept {
            if others.contains(&pair.into()) {
                sorted.unknown.push(pair.into());
            } else if is_plain(pair) {
                sorted.understood.push(without_white_space(pair));
            } else {
                sorted.strange.push(pair.into());
            }
        }
        sorted
    }

    /// Returns the searched options of `config` together with the kept pairs, as text.
    pub(crate) fn conf_with(&self, config: &Config) -> String {
        let searched = config.to_conf();
        let searched = conf_pairs(&searched).filter(|pair| is_searched(pair));
        let kept = self.understood.iter().map(String::as_str);
        let others = self.strange.iter().chain(&self.unknown);
        let kept = kept.chain(others.map(|pair| pair.raw()));
        let pairs: Vec<&str> = searched.chain(kept).collect();
        pairs.join(",")
    }
}

/// Returns a pair without white space, which PyTorch ignores.
fn without_white_space(pair: &str) -> String {
    pair.split_ascii_whitespace().collect()
}

/// Returns whether a pair contains only characters that PyTorch's options use.
fn is_plain(pair: &str) -> bool {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "_-.:,[]>".contains(letter);
    without_white_space(pair).chars().all(is_plain)
}

/// Returns a pair's key without white space.
fn key_of(pair: &str) -> String {
    without_white_space(pair.split(':').next().unwrap_or_default())
}

fn is_searched(pair: &str) -> bool {
    SEARCHED_KEYS.contains(&&*key_of(pair))
}

#[cfg(test)]
mod tests {
    use lowtide_core::{DeviceAddress, Event, MempoolId, Stream};
    use lowtide_trace::{StackId, TraceEvent};

    use super::*;

    fn requests(sizes_mib: &[u64]) -> Trace {
        let event = |&mib| TraceEvent {
            event: Event {
                action: Action::Alloc,
                pool: MempoolId::DEFAULT,
                address: DeviceAddress(0),
                size: Bytes::mib(mib),
                stream: Stream::DEFAULT,
            },
            time_us: 0,
            stack: StackId::default(),
            pool_known: false,
            note: lowtide_trace::NoteId::NONE,
        };
        Trace {
            events: sizes_mib.iter().map(event).collect(),
            ..Trace::default()
        }
    }

    fn recorded_with(conf: &str) -> Trace {
        let mut trace = Trace::default();
        trace.settings.conf = conf.into();
        trace
    }

    #[test]
    fn what_is_not_searched_is_kept() {
        let check = |conf: &str, understood: &[&str], strange: &[&str], unknown: &[&str]| {
            let trace = recorded_with(conf);
            let kept = Kept::new(&trace);
            assert_eq!(kept.understood, understood);
            let raw = |pairs: &[RecordedStr<'_>]| -> Vec<String> {
                pairs.iter().map(|pair| pair.raw().to_owned()).collect()
            };
            assert_eq!(raw(&kept.strange), strange);
            assert_eq!(raw(&kept.unknown), unknown);
        };
        check(
            "pinned_use_cuda_host_register:True, expandable_segments : True,\
             roundup_power2_divisions:[256:1,512:2],backend:native,",
            &["pinned_use_cuda_host_register:True", "backend:native"],
            &[],
            &[],
        );
        check(
            "new:[1:2,>:3],backend:native,expandable_segments:perhaps",
            &["backend:native"],
            &[],
            &["new:[1:2,>:3]"],
        );
        check("", &[], &[], &[]);
        // A class of streams may have any name.
        let class = "expandable_segments_reserve_by_class:[$(x):0.5]";
        check(class, &[], &[class], &[]);
        check("new:$(x)", &[], &[], &["new:$(x)"]);
        check("backend:\tnat ive", &["backend:native"], &[], &[]);
        // PyTorch would refuse lowtide's own options.
        check(
            "free_block_order:block_age,search_after_wait:True,backend:native",
            &["backend:native"],
            &[],
            &[],
        );
        let spaced = "search_after_ wait:True,expandable_ segments:False,back end:native";
        check(spaced, &["backend:native"], &[], &[]);
    }

    #[test]
    fn what_is_not_searched_is_in_what_was_changed_too() {
        let conf =
            "max_split_size_mb:64,throw_on_cudamalloc_oom:True,roundup_power2_divisions:[1:2,>:4]";
        let config = Config::parse("caching", conf).unwrap();
        let trace = recorded_with("throw_on_cudamalloc_oom:True,backend:native");
        let text = Kept::new(&trace).conf_with(&config);
        assert_eq!(Config::parse("caching", &text), Ok(config));
        assert_eq!(text.matches("throw").count(), 1);
        assert!(
            text.ends_with(",throw_on_cudamalloc_oom:True,backend:native"),
            "{text}"
        );
    }

    #[test]
    fn split_sizes_are_the_jobs_own() {
        assert_eq!(split_sizes_mib(&requests(&[1, 19, 20])), [0; 0]);
        assert_eq!(split_sizes_mib(&requests(&[64, 64, 1])), [20, 64]);
        assert_eq!(
            split_sizes_mib(&requests(&[25, 30, 40, 50, 60, 70, 80, 90])),
            [20, 30, 50, 70, 90]
        );
    }

    #[test]
    fn a_candidate_is_what_pytorch_would_read() {
        let settings = vec![
            Setting::ExpandableSegments,
            Setting::RoundupPower2Divisions(4),
        ];
        let trace = recorded_with("new:1,backend:native");
        let candidate = Candidate::new(settings, &Kept::new(&trace)).unwrap();
        let understood = "expandable_segments:True,roundup_power2_divisions:4,backend:native";
        assert_eq!(candidate.conf.raw(), understood);
        assert_eq!(Config::parse("caching", understood), Ok(candidate.config));
        // PyTorch requires max_split_size_mb to be at least large_segment_size_mb.
        let refused = vec![
            Setting::LargeSegmentSizeMib(128),
            Setting::MaxSplitSizeMib(20),
        ];
        assert_eq!(Candidate::new(refused, &Kept::default()), None);
    }

    #[test]
    fn garbage_collection_is_tried_only_below_a_limit() {
        let trace = requests(&[64]);
        let tried = |has_limit| {
            Axes::new(&trace, has_limit)
                .combinable_with(&[])
                .concat()
                .iter()
                .any(|setting| matches!(setting, Setting::GarbageCollectionThreshold(_)))
        };
        assert!(tried(true));
        assert!(!tried(false));
    }
}
