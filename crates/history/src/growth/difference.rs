//! The difference of the memory of two recordings.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use lowtide_core::{Bytes, Stream};
use lowtide_trace::{RecordedStr, StackId, StackTable, Trace};

use crate::growth::matching::{self, Place};
use crate::growth::sites::{Extremes, Site, Sites};
use crate::growth::steps::Steps;
use crate::history::History;

/// Two recordings, compared by call site.
#[derive(Clone, Debug)]
pub struct Difference {
    /// The steps of both.
    pub steps: [Steps; 2],
    /// Whether each has stacks. If only one has, the call sites of both are sizes.
    pub has_stacks: [bool; 2],
    /// The sites with live bytes at either peak, the largest change first.
    pub sites: Vec<SiteDifference>,
}

/// The change of a call site from one recording to another.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SiteDifference {
    /// The site in the first recording and in the second.
    pub site: [Option<Site>; 2],
    /// Whether its functions are at other lines in the second recording than in the first.
    pub lines_differ: bool,
    /// Its live bytes at each recording's peak of live bytes, without memory paused then.
    pub peak_bytes: [u64; 2],
    /// The number of those blocks.
    pub peak_blocks: [u64; 2],
    /// Its requested bytes per step, on average.
    pub bytes_per_step: [f64; 2],
    /// The confidence that the second recording's steps hold more than the first's. 1 if each does, 0 if as many
    /// hold more as less, -1 if each holds less.
    pub confidence: f64,
}

impl SiteDifference {
    /// Returns by how many bytes it grew from peak to peak.
    pub fn growth_bytes(&self) -> i64 {
        let signed = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
        let [before, after] = self.peak_bytes.map(signed);
        after - before
    }
}

/// The name of a site in both recordings, without lines.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Name<'t> {
    Stack(Vec<[RecordedStr<'t>; 2]>),
    Size(Bytes, Stream),
}

/// One of the recordings.
struct Side<'a> {
    history: &'a History,
    stacks: &'a StackTable,
    steps: Steps,
    sites: Sites,
    /// The paused ranges at the peak, which are not part of it.
    away_at_peak: Vec<Range<u64>>,
}

impl Difference {
    /// Returns the change of each call site from the first recording to the second. O(n log n) for n blocks, and
    /// O(n·m) for n and m sites whose stacks differ only in lines, as long as those are few.
    ///
    /// Two sites are the same if their stacks have the same functions at the same lines. If code was edited in
    /// between, lines may differ.
    pub fn new(recordings: [(&Trace, &History); 2]) -> Difference {
        let has_stacks = recordings.map(|(_, history)| {
            let mut blocks = history.blocks.iter();
            blocks.any(|block| block.stack != StackId::NONE)
        });
        // A stack never matches a size, so every site would seem to have disappeared or appeared.
        let sites = if has_stacks[0] == has_stacks[1] {
            Sites::new
        } else {
            Sites::by_size
        };
        let sides = recordings.map(|(trace, history)| Side {
            history,
            stacks: &trace.stacks,
            steps: Steps::find(trace, history),
            sites: sites(history),
            away_at_peak: history.away_at(history.peak_live.instant),
        });
        let mut names: BTreeMap<Name<'_>, [Vec<Place>; 2]> = BTreeMap::new();
        for (index, side) in sides.iter().enumerate() {
            for number in 0..side.sites.sites.len() {
                let places = names.entry(side.name(number)).or_default();
                places[index].push(side.place(number));
            }
        }
        let matched = names.into_values().flat_map(matching::matched);
        let compared = matched.filter_map(|numbers| compare(&sides, numbers));
        let mut differences: Vec<SiteDifference> = compared.collect();
        differences.sort_by_key(|site| Reverse(site.growth_bytes().unsigned_abs()));
        Difference {
            steps: sides.map(|side| side.steps),
            has_stacks,
            sites: differences,
        }
    }
}

impl<'a> Side<'a> {
    fn name(&self, number: usize) -> Name<'a> {
        match self.sites.sites[number] {
            Site::Stack(stack) => {
                let frames = self.stacks.frames(stack);
                Name::Stack(frames.map(|frame| [frame.name, frame.filename]).collect())
            }
            Site::Size { size_max, stream } => Name::Size(size_max, stream),
        }
    }

    fn place(&self, number: usize) -> Place {
        let blocks = self.sites.blocks_of(self.history, number);
        let requests = blocks.map(|block| block.requested.get());
        Place {
            lines: self.lines(number),
            request_bytes_max: requests.max().unwrap_or(0),
            number,
        }
    }

    fn lines(&self, number: usize) -> Vec<u32> {
        match self.sites.sites[number] {
            Site::Stack(stack) => self.stacks.frames(stack).map(|frame| frame.line).collect(),
            Site::Size { .. } => Vec::new(),
        }
    }

    fn extremes(&self, number: Option<usize>) -> Vec<Extremes> {
        let (boundaries, _) = self.steps.spans();
        match number {
            Some(number) => self.sites.extremes(self.history, number, &boundaries),
            None => vec![Extremes { least: 0, most: 0 }; boundaries.len().saturating_sub(1)],
        }
    }

    /// Returns the live bytes and the number of blocks of a site at the peak.
    fn at_peak(&self, number: Option<usize>) -> (u64, u64) {
        let (history, away) = (self.history, &self.away_at_peak);
        let instant = history.peak_live.instant;
        let live_at = |number| self.sites.live_at(history, number, instant, away);
        number.map_or((0, 0), live_at)
    }

    #[expect(clippy::cast_precision_loss, reason = "an average for people")]
    fn bytes_per_step(&self, number: Option<usize>) -> f64 {
        let (Some(number), [first, .., last]) = (number, &*self.steps.boundaries) else {
            return 0.0;
        };
        let blocks = self.sites.blocks_of(self.history, number);
        let inside = blocks.filter(|block| (*first..*last).contains(&block.start));
        let bytes: u64 = inside.map(|block| block.requested.get()).sum();
        bytes as f64 / self.steps.len() as f64
    }
}

/// Returns the change of a site; `None` if it had no live bytes at either peak.
fn compare(sides: &[Side<'_>; 2], numbers: [Option<usize>; 2]) -> Option<SiteDifference> {
    let [before, after] = sides;
    let [first, second] = numbers;
    let at_peak = [before.at_peak(first), after.at_peak(second)];
    let is_live = at_peak.iter().any(|&(bytes, _)| bytes > 0);
    is_live.then(|| SiteDifference {
        site: [
            first.map(|number| before.sites.sites[number]),
            second.map(|number| after.sites.sites[number]),
        ],
        lines_differ: match (first, second) {
            (Some(first), Some(second)) => before.lines(first) != after.lines(second),
            _ => false,
        },
        peak_bytes: at_peak.map(|(bytes, _)| bytes),
        peak_blocks: at_peak.map(|(_, blocks)| blocks),
        bytes_per_step: [before.bytes_per_step(first), after.bytes_per_step(second)],
        confidence: dominance(&before.extremes(first), &after.extremes(second)),
    })
}

/// Returns the share of pairs of steps, one of each recording, in which the second's maximum is larger, minus the
/// share in which it is smaller.
#[expect(clippy::cast_precision_loss, reason = "a share")]
fn dominance(before: &[Extremes], after: &[Extremes]) -> f64 {
    let mut before: Vec<u64> = before.iter().map(|extremes| extremes.most).collect();
    before.sort_unstable();
    let mut balance = 0.0;
    for extremes in after {
        let less = before.partition_point(|&most| most < extremes.most);
        let not_more = before.partition_point(|&most| most <= extremes.most);
        balance += less as f64 - (before.len() - not_more) as f64;
    }
    let pairs = before.len() * after.len();
    balance / pairs.max(1) as f64
}
