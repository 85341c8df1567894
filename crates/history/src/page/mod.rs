//! The data of a report's page: a summary as JSON, and columns of numbers.
//!
//! - `i/` is the prefix of the names of trace `i`'s columns. All event numbers are instants
//!   ([`History`](crate::History)).
//! - A block was freed at `start + held`. Its memory could be reused at `start + held + pending`. Its size was
//!   `requested + padding` bytes.
//! - A curve has the least and the most of each `bucket_events` instants. While a segment is paused, it and its
//!   blocks are in no curve but `paused`.
//! - Texts are numbers in the summary's `strings`, which all traces share.
//! - Columns with a number for each block come last, so that a page can draw its curves before it unpacks those.

mod columns;
mod fold;
mod frames;
mod html;
mod stacks;
mod summary;
mod trace;

use std::io::{self, Write};
use std::mem;

use lowtide_core::{Bytes, MempoolId, Stream};
use lowtide_replay::Outcome;
use lowtide_trace::{AnnotationStage, RecordedText, Trace, escape_in_json};

use crate::categories::{Categories, Category};
use crate::growth::{Leaks, Site, instant_of};
use crate::history::{Block, CURVE_NAMES, History, Moment};
use crate::walk::large_page;
use columns::Columns;
use fold::Folded;
pub use fold::FoldedBlocks;
use frames::{Frames, add_moves};
use stacks::{Stacks, Strings};
use summary::{
    GrowthSummary, Instant, Oom, Peak, SiteSummary, StrategySummary, Summary, TraceSummary,
};
pub use trace::PageTrace;

/// The most bytes of a page. It stays below 30 MB, apart from parts that are not measured before they are written,
/// such as names. It is exceeded if folding every block takes more: for some ten million blocks whose sizes hardly
/// repeat.
const PAGE_BYTES_MAX: usize = 29_500_000;

/// The most attempts at finding how many blocks fit.
const ROUNDS_MAX: usize = 8;

/// The number of refusals, the first ones, of which the page has all figures. A job that continues after them may
/// have any number.
const REFUSALS_NAMED_MAX: usize = 64;

/// The most instants with a time; the times between are interpolated.
const TIMES_MAX: usize = 65_536;

/// The data of a report, trace by trace.
#[derive(Debug)]
pub struct PageData {
    summary: Summary,
    strings: Strings,
    columns: Columns,
    /// The columns with a number for each block or change. They come last, so that a page can draw its curves
    /// before it reads them.
    block_columns: Columns,
    /// The bytes that all columns take in the page.
    columns_bytes: usize,
}

/// The part of a trace's data that grows with the number of blocks that are listed one by one.
struct Listing {
    columns: Columns,
    block_columns: Columns,
    strings: Strings,
    has_stacks: bool,
    growth: GrowthSummary,
}

/// The size of a page, as far as it is known before the page is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageSize {
    /// All of it, in bytes.
    pub bytes: usize,
    /// The bytes of the names of functions and files, and of other texts of recordings.
    pub texts_bytes: usize,
    /// The number of traces in it.
    pub traces: usize,
}

impl PageData {
    /// Returns the data of an empty report. `version` is that of the program.
    pub fn new(version: &'static str) -> PageData {
        PageData {
            summary: Summary {
                version,
                traces: Vec::new(),
                strings: Vec::new(),
            },
            strings: Strings::default(),
            columns: Columns::default(),
            block_columns: Columns::default(),
            columns_bytes: 0,
        }
    }

    /// Adds a trace. Returns the blocks that are not listed one by one. Linear time, except that blocks are sorted
    /// if there are too many. Compresses the columns once before they are written, and up to ten times if there are
    /// too many blocks.
    pub fn add(&mut self, page: &PageTrace<'_>) -> Option<FoldedBlocks> {
        let left = PAGE_BYTES_MAX.saturating_sub(self.size().bytes);
        let bytes_max = share(left, page.lengths);
        self.add_within(page, bytes_max)
    }

    /// Returns the size of the page if it exceeds the limit, which folding blocks could not prevent.
    pub fn too_large(&self) -> Option<PageSize> {
        Some(self.size()).filter(|size| size.bytes > PAGE_BYTES_MAX)
    }

    fn size(&self) -> PageSize {
        let summary = serde_json::to_string(&self.summary).map_or(0, |json| json.len());
        let texts_bytes = summary + self.strings.page_bytes();
        PageSize {
            bytes: html::PAGE.len() + self.columns_bytes + texts_bytes,
            texts_bytes,
            traces: self.summary.traces.len(),
        }
    }

    /// Like [`add`](PageData::add), within `bytes_max` bytes of the page if folding blocks can achieve that.
    fn add_within(&mut self, page: &PageTrace<'_>, bytes_max: usize) -> Option<FoldedBlocks> {
        let PageTrace { trace, history, .. } = *page;
        let mut columns = Columns::of_trace(self.summary.traces.len());
        add_curves(&mut columns, history);
        add_replayed(&mut columns, history, page.replayed);
        let duration_us = add_times(&mut columns, trace);
        let texts_before = self.strings.page_bytes();
        add_annotations(&mut columns, &mut self.strings, trace);
        add_moves(&mut columns, trace);
        let mut columns_bytes = columns.page_bytes();

        let list = |folded: Option<&Folded>| {
            let listing = self.listing(page, folded);
            let texts = listing.strings.page_bytes() - texts_before;
            let bytes = listing.columns.page_bytes() + listing.block_columns.page_bytes();
            ((listing, bytes), bytes + texts)
        };
        let listing_max = bytes_max.saturating_sub(columns_bytes);
        let (folded, (listing, bytes)) = fit(page, listing_max, list);
        let folded = folded.map(|folded| folded.blocks);
        columns_bytes += bytes;
        columns.append(listing.columns);
        self.columns.append(columns);
        self.block_columns.append(listing.block_columns);
        self.columns_bytes += columns_bytes;
        self.strings = listing.strings;
        self.summary.traces.push(TraceSummary {
            duration_us,
            has_stacks: listing.has_stacks,
            growth: listing.growth,
            aggregated: folded,
            ..trace_summary(page)
        });
        folded
    }

    /// Writes the page with all added traces: one file that needs no other file and no network.
    ///
    /// # Errors
    ///
    /// If `out` cannot be written.
    pub fn write_page(&mut self, out: &mut dyn Write) -> io::Result<()> {
        self.summary.strings = self.strings.texts();
        let summary = escape_for_script(&serde_json::to_string(&self.summary)?);
        self.columns.append(mem::take(&mut self.block_columns));
        html::write(out, &summary, &self.columns)
    }

    /// Returns the data of the blocks that are not folded, and of their stacks.
    fn listing(&self, page: &PageTrace<'_>, folded: Option<&Folded>) -> Listing {
        let PageTrace { trace, history, .. } = *page;
        let new_columns = || Columns::of_trace(self.summary.traces.len());
        let (mut columns, mut block_columns) = (new_columns(), new_columns());
        let mut strings = self.strings.clone();
        let mut stacks = Stacks::new(&trace.stacks);
        add_blocks(&mut block_columns, page, folded, &mut stacks);
        if let Some(folded) = folded {
            folded.add_to(&mut block_columns);
        }
        let growth = add_growth(&mut columns, history, page.leaks, &mut stacks);
        // Only the stacks of blocks count: the page groups blocks by stack.
        let has_stacks = stacks.has_any();
        add_segments(&mut columns, history, &mut stacks);
        stacks.add_to(&mut columns, &mut strings);
        Listing {
            columns,
            block_columns,
            strings,
            has_stacks,
            growth,
        }
    }
}

/// Folds about as few blocks as possible such that `list` takes at most `bytes_max`, or all.
fn fit<L>(
    page: &PageTrace<'_>,
    bytes_max: usize,
    list: impl Fn(Option<&Folded>) -> (L, usize),
) -> (Option<Folded>, L) {
    let try_listing = |kept: usize| {
        let folded = Folded::new(page, kept);
        let (listing, bytes) = list(folded.as_ref());
        (kept, bytes, (folded, listing))
    };
    let whole = try_listing(page.history.blocks.len());
    if whole.1 <= bytes_max {
        return whole.2;
    }
    let (mut kept_max, mut kept_max_bytes) = (whole.0, whole.1);
    // The data may be the largest object in memory.
    drop(whole);
    let mut best = try_listing(0);
    // Blocks take about as many bytes each, so interpolation between two measured numbers of them converges fast. A
    // result that nearly fills the space is good enough. After each result that does not fit, the aim is lower.
    let mut percent = 98;
    for _ in 0..ROUNDS_MAX {
        let aim = bytes_max / 100 * percent;
        if best.1 >= bytes_max / 100 * 90 || best.1 >= aim {
            break;
        }
        let part = (aim - best.1) as u128 * (kept_max - best.0) as u128;
        let more = part / (kept_max_bytes - best.1) as u128;
        if more == 0 {
            break;
        }
        let tried = try_listing(best.0 + usize::try_from(more).unwrap_or(0));
        if tried.1 <= bytes_max {
            best = tried;
        } else {
            (kept_max, kept_max_bytes, _) = tried;
            percent -= 3;
        }
    }
    best.2
}

/// Returns how many of the `left` bytes the first of some traces gets, for traces of these lengths. All get equal
/// parts, except that shorter traces leave the bytes that they cannot need to the others.
fn share(left: usize, lengths: &[u64]) -> usize {
    let Some(&own) = lengths.first() else {
        return left;
    };
    let shorter = lengths.iter().copied().filter(|&length| length < own);
    let mut shorter: Vec<u64> = shorter.collect();
    shorter.sort_unstable();
    let (mut left, mut sharing) = (left, lengths.len());
    for length in shorter {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        left -= length.min(left / sharing);
        sharing -= 1;
    }
    left / sharing
}

fn add_blocks(
    columns: &mut Columns,
    page: &PageTrace<'_>,
    folded: Option<&Folded>,
    stacks: &mut Stacks<'_>,
) {
    let blocks = page.history.blocks.iter().enumerate();
    let is_listed = |index| folded.is_none_or(|folded| !folded.contains(index));
    let (indices, listed): (Vec<usize>, Vec<&Block>) =
        blocks.filter(|&(index, _)| is_listed(index)).unzip();
    let mut add_u32 = |name: &str, of: &mut dyn FnMut(&Block) -> u32| {
        let numbers = listed.iter().map(|block| of(block));
        columns.add_u32(&format!("blocks/{name}"), numbers);
    };
    add_u32("start", &mut |block| block.start);
    add_u32("held", &mut |block| block.freed - block.start);
    add_u32("pending", &mut |block| block.end - block.freed);
    add_u32("stream", &mut |block| block.stream);
    add_u32("pool", &mut |block| block.pool);
    add_u32("tag", &mut |block| block.tag);
    add_u32("stack", &mut |block| stacks.number(block.stack));
    let mut add_u64 = |name: &str, of: &dyn Fn(&Block) -> u64| {
        let numbers = listed.iter().map(|block| of(block));
        columns.add_u64(&format!("blocks/{name}"), numbers);
    };
    add_u64("address", &|block| block.address);
    add_u64("requested", &|block| block.requested.get());
    add_u64("padding", &|block| (block.size - block.requested).get());
    let categories = &page.leaks.categories;
    if categories.are_shown() {
        let indices = indices.iter();
        let numbers = indices.map(|&index| categories.of_block(index) as u32);
        columns.add_u32("blocks/category", numbers);
    }
    let (paths, kinds) = categories.modules_without_numbers();
    if paths.len() > 1 {
        let indices = indices.iter();
        let numbers = indices.map(|&index| kinds[categories.module_of_block(index) as usize]);
        columns.add_u32("blocks/module", numbers);
    }
}

/// Adds the boundaries of steps. Returns the growth over them.
fn add_growth(
    columns: &mut Columns,
    history: &History,
    leaks: &Leaks,
    stacks: &mut Stacks<'_>,
) -> GrowthSummary {
    let boundaries = leaks.steps.boundaries.iter().copied();
    columns.add_u32("steps/boundaries", boundaries);
    GrowthSummary::new(leaks, |site| match site {
        Site::Stack(stack) => SiteSummary::Stack {
            stack: stacks.number(stack),
        },
        Site::Size { size_max, stream } => SiteSummary::Size {
            size_max: size_max.get(),
            stream: stream_number(history, stream),
        },
    })
}

fn add_segments(columns: &mut Columns, history: &History, stacks: &mut Stacks<'_>) {
    let segments = || history.segments.iter();
    columns.add_u32("segments/start", segments().map(|segment| segment.start));
    columns.add_u32("segments/made", segments().map(|segment| segment.made));
    columns.add_u32("segments/end", segments().map(|segment| segment.end));
    columns.add_u32("segments/stream", segments().map(|segment| segment.stream));
    columns.add_u32("segments/pool", segments().map(|segment| segment.pool));
    let flags = segments()
        .map(|segment| u32::from(segment.is_large) | u32::from(segment.is_expandable) << 1);
    columns.add_u32("segments/flags", flags);
    columns.add_u64(
        "segments/address",
        segments().map(|segment| segment.address),
    );
    columns.add_u64(
        "segments/size",
        segments().map(|segment| segment.size.get()),
    );
    let stacks = segments().map(|segment| stacks.number(segment.stack));
    columns.add_u32("segments/stack", stacks);
    let pauses = || history.pauses.iter();
    columns.add_u32("pauses/start", pauses().map(|pause| pause.start));
    columns.add_u32("pauses/end", pauses().map(|pause| pause.end));
    columns.add_u32("pauses/region", pauses().map(|pause| pause.region));
    columns.add_u64("pauses/address", pauses().map(|pause| pause.address));
    columns.add_u64("pauses/size", pauses().map(|pause| pause.size.get()));
}

fn add_curves(columns: &mut Columns, history: &History) {
    for (index, curve) in CURVE_NAMES.iter().enumerate() {
        if *curve == "paused" && history.pauses.is_empty() {
            continue;
        }
        let (least, most) = (history.levels.least(index), history.levels.most(index));
        columns.add_u64(&format!("curves/{curve}/min"), least.iter().copied());
        columns.add_u64(&format!("curves/{curve}/max"), most.iter().copied());
    }
}

/// Adds the peak reserved bytes of each replay in each part.
fn add_replayed(columns: &mut Columns, history: &History, replayed: &[(String, &Outcome)]) {
    let part_instants = history.levels.part_instants();
    let parts = history.levels.most(0).len();
    for (label, outcome) in replayed {
        let mut most = vec![0; parts];
        for point in &outcome.timeline {
            let part = point.event as u64 / part_instants;
            let most = &mut most[usize::try_from(part).unwrap_or(usize::MAX).min(parts - 1)];
            *most = point.reserved_bytes.get().max(*most);
        }
        fill_forward(&mut most, outcome.timeline.len());
        let name = format!("curves/{label}/reserved/max");
        columns.add_u64(&name, most.into_iter());
    }
}

/// Adds the times of the instants, if they are recorded. Returns the duration of the recording.
fn add_times(columns: &mut Columns, trace: &Trace) -> Option<u64> {
    let first_us = trace.events.first()?.time_us;
    if first_us <= 0 {
        return None;
    }
    let step = trace.events.len().div_ceil(TIMES_MAX - 1);
    let last = trace.events.len() - 1;
    let chosen: Vec<usize> = (0..last).step_by(step).chain([last]).collect();
    let mut elapsed = 0;
    let times: Vec<u64> = chosen
        .iter()
        // Threads may record their events in another order than that of their times.
        .map(|&index| {
            let since = trace.events[index].time_us.saturating_sub(first_us);
            elapsed = elapsed.max(u64::try_from(since).unwrap_or(0));
            elapsed
        })
        .collect();
    let instants = { chosen.iter() }.map(|&index| u32::try_from(index + 1).unwrap_or(u32::MAX));
    columns.add_u32("events/time_event", instants);
    columns.add_u64("events/time_us", times.into_iter());
    Some(elapsed)
}

fn add_annotations(columns: &mut Columns, strings: &mut Strings, trace: &Trace) {
    let annotations = || trace.annotations.iter();
    let instants = annotations().map(|annotation| instant_of(trace, annotation));
    columns.add_u32("annotations/event", instants);
    let names = annotations().map(|annotation| strings.number(annotation.name.raw()));
    columns.add_u32("annotations/name", names);
    let stages = annotations().map(|annotation| match annotation.stage {
        AnnotationStage::Start => 0,
        AnnotationStage::End => 1,
    });
    columns.add_u32("annotations/stage", stages);
}

/// Returns the summary of a trace before its columns are added.
fn trace_summary(page: &PageTrace<'_>) -> TraceSummary {
    let PageTrace { trace, history, .. } = *page;
    TraceSummary {
        name: page.name.to_owned(),
        device: (!page.is_host).then_some(trace.device),
        events: history.events,
        duration_us: None,
        has_stacks: false,
        categories: category_names(&page.leaks.categories),
        modules: page.leaks.categories.modules_without_numbers().0,
        settings: trace.settings.conf.clone(),
        strategy: if page.is_host {
            String::new()
        } else {
            trace.strategy_in_force()
        },
        sizes: if history.sizes_are_verified {
            "verified"
        } else {
            "estimated"
        },
        main_stream: stream_number(history, history.main_stream),
        large_page: large_page(trace).get(),
        streams: history.streams.iter().copied().map(stream_text).collect(),
        pools: { history.pools.iter() }
            .map(|&pool| pool_text(pool, trace.regions.get(&pool)))
            .collect(),
        pool_regions: { history.pools.iter() }
            .map(|pool| trace.regions.get(pool).cloned().unwrap_or_default())
            .collect(),
        tags: history.tags.clone(),
        regions: history.regions.clone(),
        bucket_events: history.levels.part_instants(),
        peak_live: Peak::new(&history.peak_live, history.peak_live.fragmentation.live),
        peak_reserved: Peak::new(
            &history.peak_reserved,
            history.peak_reserved.fragmentation.reserved,
        ),
        peak_paused: peak_paused(history),
        frames: Frames::of(trace, &page.leaks.steps),
        ooms: ooms(history),
        instants: instants(history),
        aggregated: None,
        strategies: page.replayed.iter().map(strategy_summary).collect(),
        replay_notes: page.replay_notes.to_vec(),
        growth: GrowthSummary::default(),
        initial_blocks: trace.initial.blocks.len(),
        is_cut_off: page.is_cut_off,
        missed_events: trace.missed_events,
        skipped_events: trace.skipped_events,
        contradictions: history.contradictions,
    }
}

/// Returns the names of the categories, by the numbers of blocks; none if nothing shows categories.
fn category_names(categories: &Categories) -> Vec<&'static str> {
    if categories.are_shown() {
        Category::ALL.into_iter().map(Category::name).collect()
    } else {
        Vec::new()
    }
}

/// Returns a stream's number in the history; 0 for a stream without blocks or segments.
fn stream_number(history: &History, stream: Stream) -> u32 {
    let mut numbered = (0..).zip(&history.streams);
    let found = numbered.find(|&(_, &known)| known == stream);
    found.map_or(0, |(number, _)| number)
}

/// Returns the instants of which the page has the exact figures.
fn instants(history: &History) -> Vec<Instant> {
    let instant = |label: &str, moment: &Moment| {
        Instant::new(label, moment, stream_number(history, moment.stream))
    };
    let mut instants = vec![
        instant("peak live", &history.peak_live),
        instant("peak reserved", &history.peak_reserved),
    ];
    for (number, refusal) in (1..=REFUSALS_NAMED_MAX).zip(&history.refusals) {
        let label = match number {
            1 => "out of memory".to_owned(),
            _ => format!("out of memory {number}"),
        };
        instants.push(instant(&label, &refusal.moment));
    }
    instants.push(instant("end", &history.end));
    instants
}

/// Returns the peak paused bytes.
fn peak_paused(history: &History) -> u64 {
    let most = history.levels.most(CURVE_NAMES.len() - 1).iter();
    most.copied().max().unwrap_or(0)
}

fn ooms(history: &History) -> Vec<Oom> {
    let refusals = history.refusals.iter();
    let ooms = refusals.map(|refusal| Oom {
        event: refusal.moment.instant,
        requested: refusal.requested.get(),
        stream: stream_number(history, refusal.moment.stream),
        device_free: refusal.device_free.get(),
        largest_free: refusal.largest_free.map(Bytes::get),
    });
    ooms.collect()
}

/// Gives parts without a point of the timeline the value of the part before. A job that ran out of memory has no
/// value after its end.
fn fill_forward(most: &mut [u64], points: usize) {
    let last = most.iter().rposition(|&bytes| bytes > 0);
    let end = last.filter(|_| points > 0).map_or(0, |last| last + 1);
    let mut held = 0;
    for bytes in &mut most[..end] {
        if *bytes == 0 {
            *bytes = held;
        }
        held = *bytes;
    }
}

fn strategy_summary((label, outcome): &(String, &Outcome)) -> StrategySummary {
    StrategySummary {
        label: label.clone(),
        peak_reserved_bytes: outcome.peak_reserved_bytes.get(),
        ratio: outcome.reserved_ratio,
        driver_time_us: outcome.driver_time_us,
        completed: outcome.completed,
    }
}

/// Returns the name of a trace in a recording with `traces` traces.
pub fn trace_name(recording: &str, trace: &Trace, traces: usize) -> String {
    let member = trace.member.as_ref();
    let recording = member.map_or_else(
        || recording.to_owned(),
        |member| format!("{recording}, snapshot {member}"),
    );
    match traces {
        1 => recording,
        _ => format!("{recording}, device {}", trace.device),
    }
}

/// Returns a stream's handle as users know it: decimal for small numbers, hexadecimal for addresses.
pub fn stream_text(stream: Stream) -> String {
    match stream.0 {
        handle @ 0..=0xffff => handle.to_string(),
        handle => format!("{handle:#x}"),
    }
}

/// Returns the name of a pool, which may hold the memory of a region.
pub fn pool_text(pool: MempoolId, region: Option<&RecordedText>) -> String {
    match (pool, region) {
        (MempoolId::DEFAULT, _) => "default".to_owned(),
        (private, Some(tag)) => format!("region {tag} {private}"),
        (private, None) => private.to_string(),
    }
}

/// Returns `json` such that a browser finds neither the end of the script nor a comment in it, and a terminal finds
/// no control characters. Only strings in `json` may have these characters.
fn escape_for_script(json: &str) -> String {
    escape_in_json(json)
        .replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sizes::BlockSizes;

    #[test]
    fn what_short_traces_do_not_need_is_for_the_others() {
        assert_eq!(share(900, &[]), 900);
        assert_eq!(share(900, &[5000]), 900);
        assert_eq!(share(900, &[5000, 5000, 5000]), 300);
        assert_eq!(share(900, &[5000, 100, 5000]), 400);
        assert_eq!(share(900, &[100, 5000, 5000]), 300);
        assert_eq!(share(900, &[5000, 100, 20, 5000]), 390);
        assert_eq!(share(900, &[5000, 4000]), 450);
    }

    #[test]
    fn a_trace_takes_no_more_of_the_page_than_it_has_and_lists_what_fits() {
        let trace = fold::tests::trace(40_000);
        let sizes = BlockSizes::estimated(&trace);
        let history = History::new(&trace, &sizes);
        let leaks = Leaks::find(&trace, &history);
        let page = fold::tests::page(&trace, &sizes, &history, &leaks);
        let add = |bytes_max: usize| {
            let mut data = PageData::new("0");
            let folded = data.add_within(&page, bytes_max);
            let bytes = data.columns_bytes + data.strings.page_bytes();
            (folded.map_or(0, |folded| folded.blocks), bytes)
        };
        let (folded, all_bytes) = add(usize::MAX);
        assert_eq!(folded, 0);
        let mut before = 0;
        for percent in [100, 95, 90, 80] {
            let bytes_max = all_bytes * percent / 100 + 1000;
            let (folded, bytes) = add(bytes_max);
            assert!(bytes <= bytes_max, "{bytes} of {bytes_max}");
            // No more blocks are folded than needed, or few more.
            assert!(
                folded == 0 || bytes > bytes_max * 85 / 100,
                "{bytes} of {bytes_max}"
            );
            assert!(folded >= before, "{folded} after {before}");
            before = folded;
        }
        assert!(before > 0 && before < 40_000, "{before}");
        assert_eq!(add(0).0, 40_000, "less than none cannot be listed");
    }
}
