//! The steps of a job, which a recording does not say: what a training loop does once, or the work on one
//! batch.
//!
//! Where the program marked its optimizer's steps, those are the steps. Else they are found by what
//! repeats: an *anchor* is a request that is made once a step, or every second, third, … of one that is made
//! several times; the instants at which the least is live are tried too. With good boundaries each request
//! is made as often in one step as in the next, and about as much is live at each boundary, which tells a
//! step from a layer. Of those that are about as good as the best, the one with the most steps is taken:
//! with twice as long steps, all repeats as well.

use hashbrown::HashMap;
use lowtide_core::{Action, Bytes};
use lowtide_trace::{AnnotationStage, StackId, Trace};

use crate::growth::line::{Fit, as_float};
use crate::history::History;

/// Fewer steps tell nothing.
const STEPS_MIN: usize = 4;

/// More steps than this are looked at several at a time.
const SPANS_MAX: usize = 1024;

/// Into so many parts a recording is cut whose steps are not found.
const PARTS: u32 = 40;

/// How many different requests are tried as anchors, and how many others each is tried on.
const ANCHORS_MAX: usize = 48;
const WITNESSES_MAX: usize = 128;

/// A witness is looked at so many times at most.
const OCCURRENCES_MAX: usize = 20_000;

/// An anchor is every so many-th request of its kind.
const MULTIPLES: [usize; 6] = [1, 2, 3, 4, 6, 8];

/// In this share of the steps a request has to be made equally often to be said to repeat.
const REPEATED_SHARE: f64 = 0.6;

/// This share of their kinds has to repeat; and of the best share, what counts as about as good.
const QUALITY_MIN: f64 = 0.5;
const QUALITY_NEAR: f64 = 0.9;

/// What is live at the boundaries may be so far off a straight line, on average, as a share of how much
/// it varies in between.
const UNEVENNESS_MAX: f64 = 0.15;

/// In a step the live bytes fall by at least one in so many of those by which they vary.
const VALLEY_SHARE: u64 = 20;

/// The instants at which a job's steps begin and end.
#[derive(Clone, PartialEq, Debug)]
pub struct Steps {
    /// Ascending; step `i` is from `boundaries[i]` to before `boundaries[i + 1]`. What is before the first
    /// and after the last is in no whole step.
    pub boundaries: Vec<u32>,
    /// What told.
    pub source: StepSource,
}

/// What told where the steps are.
#[derive(Clone, PartialEq, Debug)]
pub enum StepSource {
    /// The program's own marks of this name.
    Annotation(String),
    /// The period of the allocations: this share of their kinds repeats from step to step, in [0, 1].
    Period(f64),
    /// Nothing: these are equal parts of the recording.
    Parts,
}

impl Steps {
    /// Returns the steps of a job. Linear time.
    pub fn find(trace: &Trace, history: &History) -> Steps {
        by_annotation(trace)
            .or_else(|| by_period(trace, history))
            .unwrap_or_else(|| equal_parts(history))
    }

    /// Returns the boundaries of the steps behind the first `skipped`, or of spans of several steps if there
    /// are very many; and how many steps a span has.
    pub(super) fn spans(&self, skipped: usize) -> (Vec<u32>, usize) {
        let span_steps = self.len().div_ceil(SPANS_MAX).max(1);
        let boundaries = self.boundaries.iter().copied().skip(skipped);
        (boundaries.step_by(span_steps).collect(), span_steps)
    }

    /// Returns how many whole steps there are.
    pub fn len(&self) -> usize {
        self.boundaries.len().saturating_sub(1)
    }

    /// Returns whether there is no whole step.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Returns the steps from one mark of an optimizer's or a profiler's step to the next.
fn by_annotation(trace: &Trace) -> Option<Steps> {
    let mut counts: HashMap<&str, usize> = HashMap::new();
    let starts = || {
        let annotations = trace.annotations.iter();
        annotations.filter(|annotation| annotation.stage == AnnotationStage::Start)
    };
    for annotation in starts() {
        *counts.entry(common_name(&annotation.name)).or_default() += 1;
    }
    let is_step = |name: &str| name.starts_with("Optimizer.step#") || name == "ProfilerStep#";
    let named = counts.iter().filter(|(name, _)| is_step(name));
    // Of equals, the first name: no order depends on a hash table.
    let (&name, _) = named.max_by_key(|&(name, &count)| (count, std::cmp::Reverse(*name)))?;
    let marks = starts().filter(|annotation| common_name(&annotation.name) == name);
    let mut boundaries: Vec<u32> = marks
        .map(|annotation| {
            let before = |event: &lowtide_trace::TraceEvent| event.time_us <= annotation.time_us;
            u32::try_from(trace.events.partition_point(before)).unwrap_or(u32::MAX)
        })
        .collect();
    boundaries.sort_unstable();
    boundaries.dedup();
    (boundaries.len() > STEPS_MIN).then(|| Steps {
        boundaries,
        source: StepSource::Annotation(name.to_owned()),
    })
}

/// Returns the name without the number that a profiler gives each step.
fn common_name(name: &str) -> &str {
    match name.strip_prefix("ProfilerStep#") {
        Some(_) => "ProfilerStep#",
        None => name,
    }
}

/// Returns the steps by what repeats.
fn by_period(trace: &Trace, history: &History) -> Option<Steps> {
    let kinds = kinds_of_requests(history);
    let witnesses = witnesses(&kinds);
    let live = live_bytes(trace);
    let of_anchors = anchors(&kinds).into_iter().flat_map(|kind| {
        let every = |multiple: usize| kind.iter().copied().step_by(multiple).collect();
        MULTIPLES.map(every)
    });
    let candidates: Vec<(f64, Vec<u32>)> = of_anchors
        .chain([valleys(&live)])
        .filter(|boundaries: &Vec<u32>| boundaries.len() > STEPS_MIN)
        .filter(|boundaries| covers(boundaries, history) && is_even(boundaries, &live))
        .map(|boundaries| (quality(&boundaries, &witnesses), boundaries))
        .collect();
    let best = candidates
        .iter()
        .map(|&(quality, _)| quality)
        .fold(0.0, f64::max);
    if best < QUALITY_MIN {
        return None;
    }
    let good = candidates
        .into_iter()
        .filter(|&(quality, _)| quality >= QUALITY_NEAR * best);
    let (quality, boundaries) = good
        // Of equals, the last is returned: the one that begins first.
        .max_by_key(|(_, boundaries)| (boundaries.len(), std::cmp::Reverse(boundaries[0])))?;
    Some(Steps {
        boundaries,
        source: StepSource::Period(quality),
    })
}

/// Returns when requests of each kind were made, of kinds that came all through the recording: those of
/// one stack, and of one exact size and stream where there is no stack.
fn kinds_of_requests(history: &History) -> Vec<Vec<u32>> {
    let mut numbers: HashMap<(StackId, Bytes, u32), usize> = HashMap::new();
    let mut kinds: Vec<Vec<u32>> = Vec::new();
    for block in &history.blocks {
        let kind = match block.stack {
            StackId::NONE => (StackId::NONE, block.requested, block.stream),
            stack => (stack, Bytes::ZERO, 0),
        };
        let number = *numbers.entry(kind).or_insert(kinds.len());
        if number == kinds.len() {
            kinds.push(Vec::new());
        }
        if block.start > 0 {
            kinds[number].push(block.start);
        }
    }
    // Of a step that is longer than the others there are requests that come many times and never again.
    kinds.retain(|kind| kind.len() > STEPS_MIN && covers(kind, history));
    kinds
}

/// Returns the kinds to try as anchors: of each number of requests that many kinds share, the ones that
/// come first.
fn anchors(kinds: &[Vec<u32>]) -> Vec<&Vec<u32>> {
    const OF_EACH_NUMBER: usize = 2;
    let mut by_count: Vec<&Vec<u32>> = kinds.iter().collect();
    by_count.sort_by_key(|kind| (kind.len(), kind[0]));
    let mut shared: Vec<&[&Vec<u32>]> = by_count
        .chunk_by(|left, right| left.len() == right.len())
        .collect();
    // What few kinds share is tried last, and of that the rarest first.
    shared.sort_by_key(|same| std::cmp::Reverse(same.len()));
    let chosen = shared
        .into_iter()
        .flat_map(|same| same.iter().take(OF_EACH_NUMBER));
    chosen.take(ANCHORS_MAX).copied().collect()
}

/// Returns kinds from all over, the first so many requests of each.
fn witnesses(kinds: &[Vec<u32>]) -> Vec<&[u32]> {
    let step = kinds.len().div_ceil(WITNESSES_MAX).max(1);
    let chosen = kinds.iter().step_by(step);
    chosen
        .map(|kind| &kind[..kind.len().min(OCCURRENCES_MAX)])
        .collect()
}

/// Returns whether it is most of the recording from the first of some instants to the last.
fn covers(instants: &[u32], history: &History) -> bool {
    let covered = instants[instants.len() - 1] - instants[0];
    u64::from(covered) * 2 > u64::from(history.events)
}

/// Returns which share of the witnesses comes equally often in most steps.
fn quality(boundaries: &[u32], witnesses: &[&[u32]]) -> f64 {
    let repeated = witnesses
        .iter()
        .filter(|witness| repeats(boundaries, witness));
    // None counts for more than another, however often it comes: an anchor always repeats itself.
    as_float(repeated.count() as u64) / as_float(witnesses.len().max(1) as u64)
}

/// Returns whether the requests come equally often, but not never, in most of the steps that they cover.
fn repeats(boundaries: &[u32], requests: &[u32]) -> bool {
    let last = requests[requests.len() - 1];
    let mut counts: HashMap<usize, u64> = HashMap::new();
    let mut steps = 0;
    let mut from = requests.partition_point(|&request| request < boundaries[0]);
    for end in boundaries[1..]
        .iter()
        .take_while(|&&end| end <= last.max(boundaries[1]))
    {
        let count = requests[from..].partition_point(|request| request < end);
        from += count;
        steps += 1;
        *counts.entry(count).or_default() += 1;
    }
    let often = counts.into_iter().filter(|&(count, _)| count > 0);
    let most = often.map(|(_, steps)| steps).max().unwrap_or(0);
    steps > 1 && as_float(most) >= REPEATED_SHARE * as_float(steps)
}

/// Returns what is live at each instant.
fn live_bytes(trace: &Trace) -> Vec<u64> {
    let initial = trace.initial.blocks.iter();
    let mut live: u64 = initial.map(|block| block.requested.get()).sum();
    let first = [live];
    let events = trace.events.iter().map(|recorded| {
        let event = recorded.event;
        match event.action {
            Action::Alloc => live = live.saturating_add(event.size.get()),
            Action::FreeRequested => live = live.saturating_sub(event.size.get()),
            _ => {}
        }
        live
    });
    first.into_iter().chain(events).collect()
}

/// Returns the instants at which the least is live, one between each two at which much is: half of what
/// came since one has to go before the next.
fn valleys(live: &[u64]) -> Vec<u32> {
    let (least, most) = range(live);
    let swing_min = (most - least) / VALLEY_SHARE;
    let mut valleys = Vec::new();
    let mut low = (live[0], 0);
    let mut high = live[0];
    let mut is_falling = false;
    for (instant, &bytes) in (0_u32..).zip(live) {
        if is_falling {
            low = low.min((bytes, instant));
            if bytes > low.0.saturating_add(swing_min) {
                valleys.push(low.1);
                (is_falling, high) = (false, bytes);
            }
        } else {
            high = high.max(bytes);
            let swing = swing_min.max(high.saturating_sub(low.0) / 2);
            if bytes.saturating_add(swing) < high {
                (is_falling, low) = (true, (bytes, instant));
            }
        }
    }
    valleys
}

/// Returns whether what is live at the boundaries stays the same or grows evenly, the first steps left
/// out.
fn is_even(boundaries: &[u32], live: &[u64]) -> bool {
    let boundaries = &boundaries[boundaries.len() / 4..];
    let between = &live[boundaries[0] as usize..=boundaries[boundaries.len() - 1] as usize];
    let (least, most) = range(between);
    let at = boundaries.iter().map(|&instant| live[instant as usize]);
    let at: Vec<u64> = at.collect();
    Fit::of(&at).distance() <= UNEVENNESS_MAX * as_float(most - least)
}

fn range(values: &[u64]) -> (u64, u64) {
    let least = values.iter().copied().min().unwrap_or(0);
    (least, values.iter().copied().max().unwrap_or(0))
}

fn equal_parts(history: &History) -> Steps {
    let parts = PARTS.min(history.events.max(1));
    let boundary = |part: u32| {
        let instant = u64::from(part) * u64::from(history.events) / u64::from(parts);
        u32::try_from(instant).unwrap_or(history.events)
    };
    Steps {
        boundaries: (0..=parts).map(boundary).collect(),
        source: StepSource::Parts,
    }
}
