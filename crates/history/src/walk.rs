//! The walk over a recording's events that computes its [`History`].

use std::collections::{BTreeMap, BTreeSet};

use hashbrown::HashMap;
use lowtide_core::{
    Action, BlockStatus, Bytes, Cause, Config, Event, Fragmentation, FreeBytes, MempoolId, Stream,
};
use lowtide_trace::{NoteId, RecordedStr, RecordedText, StackId, Trace, TraceEvent};

use crate::changes::{FRAGMENTATION_PARTS, FragmentationChanges};
use crate::history::{Block, CURVES, History, Moment, Pause, Refusal, SegmentLife};
use crate::labels::says_what_ran;
use crate::levels::Levels;
use crate::numbering::Numbering;
use crate::sizes::BlockSizes;
use crate::space::{Domain, Space};

/// The end of a lifetime that has not ended yet.
const NEVER: u32 = u32::MAX;

/// The number of refusals, the first ones, for which the largest free block is found: that visits every block.
const REFUSALS_SEARCHED_MAX: usize = 3;

impl History {
    /// Returns the history of a recording whose blocks have these sizes. O(n log m) for n events and m segments; takes
    /// 64 bytes for a block.
    ///
    /// # Panics
    ///
    /// If `sizes` is of another recording, or there are 2^32 - 2 events.
    pub fn new(trace: &Trace, sizes: &BlockSizes) -> History {
        Walk::new(trace, sizes).finish()
    }

    /// Returns how the blocks that are not listed change the main stream's fragmentation at each instant. The page counts the
    /// listed blocks itself and adds these changes. Takes as long as [`History::new`], from the same data.
    pub(crate) fn changes_by_unlisted(
        trace: &Trace,
        sizes: &BlockSizes,
        is_listed: &[bool],
    ) -> FragmentationChanges {
        Walk::new(trace, sizes).changes_by_unlisted(is_listed)
    }
}

/// The state with only the listed blocks: all segments, and the difference of the fragmentation.
struct Listed<'a> {
    /// Whether each block of the history is listed.
    is_listed: &'a [bool],
    space: Space,
    /// The instants at which the difference changes, with the number of each change.
    changes: Vec<(u32, u32)>,
    distinct: Numbering<[i64; FRAGMENTATION_PARTS]>,
    /// The difference of the fragmentation at the instant before: live and causes.
    difference: [i64; FRAGMENTATION_PARTS],
}

/// The state of a walk.
struct Walk<'a> {
    trace: &'a Trace,
    sizes: &'a BlockSizes,
    space: Space,
    listed: Option<Listed<'a>>,
    large_page: Bytes,
    /// The numbers of the blocks in use, by address.
    in_use: HashMap<u64, usize>,
    /// The addresses of the blocks in use, sorted. Kept from the first pause on.
    in_order: Option<BTreeSet<u64>>,
    /// The numbers of the pauses in effect, by address.
    paused: BTreeMap<u64, usize>,
    /// The numbers of the existing segments and ranges, by address.
    present: BTreeMap<u64, usize>,
    /// The blocks outside every segment. Each gets a segment of its own.
    alone: HashMap<u64, Bytes>,
    streams: Numbering<Stream>,
    pools: Numbering<MempoolId>,
    tags: Numbering<&'a str>,
    annotations: Numbering<&'a str>,
    /// The tags that notes say, by the notes that occurred.
    said: HashMap<NoteId, Option<&'a str>>,
    regions: Numbering<&'a str>,
    blocks: Vec<Block>,
    segments: Vec<SegmentLife>,
    pauses: Vec<Pause>,
    /// The number of blocks so far, with those that were left out.
    block_number: usize,
    now: Moment,
    peak_live: Moment,
    peak_reserved: Moment,
    peak_requested: Bytes,
    refusals: Vec<Refusal>,
    levels: Levels<CURVES>,
    contradictions: u64,
}

impl<'a> Walk<'a> {
    fn new(trace: &'a Trace, sizes: &'a BlockSizes) -> Walk<'a> {
        let stream = main_stream(trace);
        let large_page = large_page(trace);
        let mut pools = Numbering::default();
        pools.number(MempoolId::DEFAULT);
        let mut tags = Numbering::default();
        tags.number("");
        let mut annotations = Numbering::default();
        annotations.number("");
        Walk {
            trace,
            sizes,
            space: Space::new(stream, large_page),
            listed: None,
            large_page,
            in_use: HashMap::new(),
            in_order: None,
            paused: BTreeMap::new(),
            present: BTreeMap::new(),
            alone: HashMap::new(),
            streams: Numbering::default(),
            pools,
            tags,
            annotations,
            said: HashMap::new(),
            regions: Numbering::default(),
            blocks: Vec::with_capacity(trace.initial.blocks.len() + trace.allocs()),
            segments: Vec::new(),
            pauses: Vec::new(),
            block_number: 0,
            now: Moment {
                stream,
                ..Moment::default()
            },
            peak_live: Moment::default(),
            peak_reserved: Moment::default(),
            peak_requested: Bytes::ZERO,
            refusals: Vec::new(),
            levels: Levels::new(trace.events.len() as u64 + 1),
            contradictions: 0,
        }
    }

    /// Returns what the blocks that are not listed add to the fragmentation. `is_listed` has a value for each block of the
    /// history.
    fn changes_by_unlisted(mut self, is_listed: &'a [bool]) -> FragmentationChanges {
        self.listed = Some(Listed {
            is_listed,
            space: self.space.clone(),
            changes: Vec::new(),
            distinct: Numbering::default(),
            difference: [0; FRAGMENTATION_PARTS],
        });
        self.take_all();
        let changes = self.listed.map(|listed| {
            let (instants, numbers) = listed.changes.into_iter().unzip();
            FragmentationChanges {
                instants,
                numbers,
                distinct: listed.distinct.into_values(),
            }
        });
        changes.unwrap_or_default()
    }

    fn take_all(&mut self) {
        self.begin();
        for recorded in &self.trace.events {
            self.now.instant += 1;
            self.take(recorded);
            self.note_instant();
        }
        self.levels.finish();
    }

    fn finish(mut self) -> History {
        let events = u32::try_from(self.trace.events.len()).expect("fewer than 2^32 events");
        assert!(events < NEVER - 1, "instants are numbered in 32 bits");
        self.take_all();
        for block in &mut self.blocks {
            block.freed = block.freed.min(events + 1);
            block.end = block.end.min(events + 1);
        }
        for segment in &mut self.segments {
            segment.end = segment.end.min(events + 1);
        }
        for pause in &mut self.pauses {
            pause.end = pause.end.min(events + 1);
        }
        let texts = |numbered: Numbering<&str>| -> Vec<String> {
            numbered.values().iter().map(ToString::to_string).collect()
        };
        History {
            events,
            blocks: self.blocks,
            segments: self.segments,
            streams: self.streams.into_values(),
            pools: self.pools.into_values(),
            tags: texts(self.tags),
            annotations: texts(self.annotations),
            regions: texts(self.regions),
            pauses: self.pauses,
            main_stream: self.now.stream,
            peak_live: self.peak_live,
            peak_reserved: self.peak_reserved,
            peak_requested: self.peak_requested,
            refusals: self.refusals,
            end: self.now,
            levels: self.levels,
            sizes_are_verified: self.sizes.are_verified(),
            contradictions: self.contradictions,
        }
    }

    /// Adds the segments, blocks and pauses from before the first event.
    fn begin(&mut self) {
        for segment in &self.trace.initial.segments {
            let domain = Domain {
                stream: segment.stream,
                pool: segment.pool.unwrap_or_default(),
                is_large: segment.is_large || segment.is_expandable && self.pages_are_alike(),
                is_expandable: segment.is_expandable,
            };
            self.add_segment(segment.address.get(), segment.size, domain, StackId::NONE);
        }
        let blocks = &self.trace.initial.blocks;
        for (index, block) in blocks.iter().enumerate() {
            let next = blocks.get(index + 1);
            let room = next.map(|next| next.address.offset_from(block.address));
            let size = self.sizes.size(self.block_number, block.requested);
            let size = size.max(block.size);
            let pool = block.pool.unwrap_or_default();
            let block_in_use = Block {
                start: 0,
                freed: NEVER,
                end: NEVER,
                stream: self.streams.number(block.stream),
                pool: self.pools.number(pool),
                tag: self.tag_of(pool, None),
                annotation: 0,
                stack: block.stack,
                address: block.address.get(),
                size: room.map_or(size, |room| size.min(room)),
                requested: block.requested,
            };
            if self.add_block(block_in_use) && block.status == BlockStatus::PendingFree {
                self.free_requested(block.address.get());
            }
        }
        for recorded in &self.trace.initial.paused {
            self.pause(recorded);
        }
        self.note_instant();
    }

    fn take(&mut self, recorded: &TraceEvent) {
        let Event { action, size, .. } = recorded.event;
        let address = recorded.event.address.get();
        match action {
            Action::Alloc => self.alloc(recorded),
            Action::FreeRequested => self.free_requested(address),
            Action::FreeCompleted => self.free_completed(address),
            Action::SegmentAlloc | Action::SegmentMap => {
                let domain = self.domain_of(recorded);
                self.add_segment(address, size, domain, recorded.stack);
            }
            Action::SegmentFree | Action::SegmentUnmap => self.remove_segment(address, size),
            Action::OutOfMemory => self.refuse(recorded),
            Action::SegmentPaused => self.pause(recorded),
            Action::SegmentResumed => self.resume(address, size),
            Action::Annotate => self.annotate(recorded),
            Action::Snapshot => {}
        }
    }

    /// Notes what the program said of a block. A block that it does not hold has no annotation.
    fn annotate(&mut self, recorded: &TraceEvent) {
        let said = self.said_of(recorded).unwrap_or_default();
        if let Some(&index) = self.in_use.get(&recorded.event.address.get()) {
            self.blocks[index].annotation = self.annotations.number(said);
        }
    }

    fn alloc(&mut self, recorded: &TraceEvent) {
        let event = recorded.event;
        let size = self.sizes.size(self.block_number, event.size);
        let tag = self.tag_said(recorded);
        let block = Block {
            start: self.now.instant,
            freed: NEVER,
            end: NEVER,
            stream: self.streams.number(event.stream),
            pool: self.pools.number(event.pool),
            tag: self.tag_of(event.pool, tag),
            annotation: 0,
            stack: recorded.stack,
            address: event.address.get(),
            size,
            requested: event.size,
        };
        self.add_block(block);
    }

    /// Returns the user metadata of an event.
    fn said_of(&self, recorded: &TraceEvent) -> Option<&'a str> {
        let note = self.trace.stacks.note(recorded.note);
        note.user_metadata.map(RecordedStr::raw)
    }

    /// Returns the user metadata of an event, if it is no label of what ran.
    fn tag_said(&mut self, recorded: &TraceEvent) -> Option<&'a str> {
        let said = self.said_of(recorded);
        let is_tag = |said: &&str| !says_what_ran(said);
        let tags = self.said.entry(recorded.note);
        *tags.or_insert_with(|| said.filter(is_tag))
    }

    /// Returns the number of a block's tag: its user metadata, or else the tag of the region whose memory its pool
    /// holds.
    fn tag_of(&mut self, pool: MempoolId, said: Option<&'a str>) -> u32 {
        let region = || self.trace.regions.get(&pool).map(RecordedText::raw);
        let tag = said.filter(|said| !said.is_empty()).or_else(region);
        self.tags.number(tag.unwrap_or_default())
    }

    /// Adds the part of a block that lies in one segment. A block outside every segment gets one of its own.
    /// Returns whether the block was added.
    fn add_block(&mut self, mut block: Block) -> bool {
        self.block_number += 1;
        let is_taken = self.in_use.contains_key(&block.address) || self.is_away(block.address);
        if is_taken || block.size.is_zero() {
            self.contradictions += u64::from(!block.size.is_zero());
            return false;
        }
        let mut covered = self.space.covered(block.address, block.size);
        if covered.is_zero() {
            covered = block.size.min(self.space.room_at(block.address));
            let domain = Domain {
                stream: self.streams.values()[block.stream as usize],
                pool: self.pools.values()[block.pool as usize],
                is_large: covered > Bytes::mib(1),
                is_expandable: false,
            };
            self.add_segment(block.address, covered, domain, block.stack);
            self.alone.insert(block.address, covered);
        }
        // The part of a block beyond its segment, or in another segment, is left out.
        if covered < block.requested {
            self.contradictions += 1;
            block.requested = covered;
        }
        block.size = covered;
        if !self.space.occupy(block.address, block.size) {
            self.contradictions += 1;
            return false;
        }
        let index = self.blocks.len();
        if let Some(listed) = self.listed_with(index) {
            listed.occupy(block.address, block.size);
        }
        self.count(index, &block, true);
        self.in_use.insert(block.address, index);
        if let Some(in_order) = &mut self.in_order {
            in_order.insert(block.address);
        }
        self.blocks.push(block);
        true
    }

    fn free_requested(&mut self, address: u64) {
        let Some(&index) = self.in_use.get(&address) else {
            return;
        };
        let before = self.blocks[index];
        if before.freed == NEVER {
            self.blocks[index].freed = self.now.instant;
            if !self.is_away(address) {
                self.count(index, &before, false);
                let waiting = self.blocks[index];
                self.count(index, &waiting, true);
            }
        }
    }

    /// Adds a block that is on the device to the sums, or subtracts it.
    fn count(&mut self, index: usize, block: &Block, is_there: bool) {
        count_block(self.space.fragmentation_mut(), block, is_there);
        if let Some(listed) = self.listed_with(index) {
            count_block(listed.fragmentation_mut(), block, is_there);
        }
        if block.freed == NEVER {
            change(&mut self.now.requested, block.requested, is_there);
        }
    }

    /// Returns the space of listed blocks, if block number `index` is listed.
    fn listed_with(&mut self, index: usize) -> Option<&mut Space> {
        let listed = self.listed.as_mut()?;
        listed.is_listed[index].then_some(&mut listed.space)
    }

    fn free_completed(&mut self, address: u64) {
        self.free_requested(address);
        let Some(index) = self.in_use.remove(&address) else {
            return;
        };
        if let Some(in_order) = &mut self.in_order {
            in_order.remove(&address);
        }
        self.blocks[index].end = self.now.instant;
        let block = self.blocks[index];
        if !self.is_away(address) {
            self.count(index, &block, false);
        }
        self.space.vacate(address, block.size);
        if let Some(listed) = self.listed_with(index) {
            listed.vacate(address, block.size);
        }
        if let Some(size) = self.alone.remove(&address) {
            self.remove_segment(address, size);
        }
    }

    /// Returns whether large expandable segments have the pages of small ones. No event then shows which they are, and
    /// all count as large.
    fn pages_are_alike(&self) -> bool {
        self.large_page == FreeBytes::SMALL_PAGE
    }

    /// Returns the domain of the memory that an event allocates.
    fn domain_of(&self, recorded: &TraceEvent) -> Domain {
        let event = recorded.event;
        let (start, end) = (event.address.get(), event.address.get() + event.size.get());
        let is_expandable = event.action == Action::SegmentMap;
        let has_large_pages = !is_expandable || (event.size % self.large_page).is_zero();
        let domain = Domain {
            stream: event.stream,
            pool: event.pool,
            is_large: self.pages_are_alike() && is_expandable
                || event.size > Bytes::mib(2) && has_large_pages,
            is_expandable,
        };
        // Adjacent pages show best whether pages are for large requests.
        let beside = [start.checked_sub(1), Some(end)].into_iter().flatten();
        let mut beside = beside.filter_map(|address| self.space.domain_at(address));
        let is_like = |other: &Domain| {
            let is_large = other.is_large;
            is_expandable && *other == Domain { is_large, ..domain }
        };
        beside.find(is_like).unwrap_or(domain)
    }

    fn add_segment(&mut self, address: u64, size: Bytes, domain: Domain, stack: StackId) {
        if !self.change_spaces(|space| space.insert(address, size, domain)) {
            self.contradictions += 1;
            return;
        }
        self.present.insert(address, self.segments.len());
        self.segments.push(SegmentLife {
            start: self.now.instant,
            made: self.now.instant,
            end: NEVER,
            stream: self.streams.number(domain.stream),
            pool: self.pools.number(domain.pool),
            address,
            size,
            is_large: domain.is_large,
            is_expandable: domain.is_expandable,
            stack,
        });
    }

    /// Changes the segments of both spaces, and returns whether that was possible. Both have the same segments.
    fn change_spaces(&mut self, change: impl Fn(&mut Space) -> bool) -> bool {
        let is_changed = change(&mut self.space);
        if is_changed && let Some(listed) = &mut self.listed {
            change(&mut listed.space);
        }
        is_changed
    }

    /// Pauses a segment with all its blocks.
    fn pause(&mut self, recorded: &TraceEvent) {
        let tag = self.said_of(recorded);
        let pause = Pause {
            start: self.now.instant,
            end: NEVER,
            region: self.regions.number(tag.unwrap_or_default()),
            address: recorded.event.address.get(),
            size: recorded.event.size,
        };
        if !self.start_pause(pause) {
            self.contradictions += 1;
        }
    }

    /// Resumes a segment, or its remaining parts.
    fn resume(&mut self, address: u64, size: Bytes) {
        let end = address.saturating_add(size.get());
        let inside = self.paused.range(address..end);
        let addresses: Vec<u64> = inside.map(|(&address, _)| address).collect();
        self.contradictions += u64::from(addresses.is_empty());
        for address in addresses {
            self.end_pause(address);
        }
    }

    /// Starts a pause. Returns whether the memory could be paused.
    fn start_pause(&mut self, pause: Pause) -> bool {
        if !self.change_spaces(|space| space.set_away(pause.address, pause.size, true)) {
            return false;
        }
        self.count_inside(&pause, false);
        self.now.paused += pause.size;
        self.paused.insert(pause.address, self.pauses.len());
        self.pauses.push(pause);
        true
    }

    /// Ends the pause of the memory at `address`. Returns the pause.
    fn end_pause(&mut self, address: u64) -> Option<Pause> {
        let index = self.paused.remove(&address)?;
        self.pauses[index].end = self.now.instant;
        let pause = self.pauses[index];
        let was_away = self.change_spaces(|space| space.set_away(address, pause.size, false));
        debug_assert!(was_away, "a segment at {address:#x}");
        self.now.paused -= pause.size;
        self.count_inside(&pause, true);
        Some(pause)
    }

    /// Adds the blocks in a paused segment to the sums, or subtracts them.
    fn count_inside(&mut self, pause: &Pause, is_there: bool) {
        let in_use = &self.in_use;
        let in_order = self
            .in_order
            .get_or_insert_with(|| in_use.keys().copied().collect());
        let end = pause.address + pause.size.get();
        let inside = in_order.range(pause.address..end);
        let blocks: Vec<usize> = inside.map(|address| in_use[address]).collect();
        for index in blocks {
            let block = self.blocks[index];
            self.count(index, &block, is_there);
        }
    }

    /// Returns whether an address is in paused memory.
    fn is_away(&self, address: u64) -> bool {
        let before = self.paused.range(..=address).next_back();
        before.is_some_and(|(&start, &index)| address - start < self.pauses[index].size.get())
    }

    fn remove_segment(&mut self, address: u64, size: Bytes) {
        let end = address.saturating_add(size.get());
        // A segment, or a part of one, may be released while it is paused. Only memory on the device can be
        // removed.
        let cut = self.end_pauses(address, end);
        let is_removed = self.change_spaces(|space| space.remove(address, size));
        for pause in cut {
            let pause_end = pause.address + pause.size.get();
            let rest = if is_removed {
                [(pause.address, address), (end, pause_end)]
            } else {
                [(pause.address, pause_end), (end, end)]
            };
            for (from, to) in rest.into_iter().filter(|(from, to)| from < to) {
                let is_away = self.start_pause(Pause {
                    start: self.now.instant,
                    end: NEVER,
                    address: from,
                    size: Bytes(to - from),
                    ..pause
                });
                debug_assert!(is_away, "what is left at {from:#x}");
            }
        }
        if !is_removed {
            self.contradictions += 1;
            return;
        }
        while let Some((&start, &index)) = self.present.range(..end).next_back() {
            let life = self.segments[index];
            let life_end = start + life.size.get();
            if life_end <= address {
                break;
            }
            self.present.remove(&start);
            self.segments[index].end = self.now.instant;
            for (from, to) in [(start, address), (end, life_end)] {
                if from < to {
                    self.present.insert(from, self.segments.len());
                    self.segments.push(SegmentLife {
                        start: self.now.instant,
                        address: from,
                        size: Bytes(to - from),
                        ..life
                    });
                }
            }
            if start <= address {
                break;
            }
        }
    }

    /// Ends the pauses that overlap a range, and returns them.
    fn end_pauses(&mut self, address: u64, end: u64) -> Vec<Pause> {
        let mut ended = Vec::new();
        while let Some((&start, &index)) = self.paused.range(..end).next_back()
            && start + self.pauses[index].size.get() > address
        {
            ended.extend(self.end_pause(start));
        }
        ended
    }

    fn refuse(&mut self, recorded: &TraceEvent) {
        let stream = recorded.event.stream;
        let moment = Moment {
            fragmentation: self.space.fragmentation_for(stream),
            stream,
            ..self.now
        };
        let is_searched = self.refusals.len() < REFUSALS_SEARCHED_MAX;
        let largest_free = is_searched.then(|| self.largest_free(stream, recorded.event.pool));
        self.refusals.push(Refusal {
            requested: recorded.event.size,
            device_free: Bytes(recorded.event.address.get()),
            largest_free,
            moment,
        });
    }

    /// Returns the size of the largest free block of a stream and a pool. O(n log n) for n blocks.
    fn largest_free(&self, stream: Stream, pool: MempoolId) -> Bytes {
        let numbers = self.in_use.iter();
        let mut blocks: Vec<(u64, u64)> = numbers
            .map(|(&address, &index)| (address, address + self.blocks[index].size.get()))
            .collect();
        blocks.sort_unstable();
        let mut largest = 0;
        self.space.each_run(stream, pool, |start, end| {
            let first = blocks.partition_point(|&(address, _)| address < start);
            let mut free_from = start;
            for &(address, block_end) in blocks[first..].iter().take_while(|block| block.0 < end) {
                largest = largest.max(address.saturating_sub(free_from));
                free_from = block_end;
            }
            largest = largest.max(end.saturating_sub(free_from));
        });
        Bytes(largest)
    }

    /// Records the figures of the current instant.
    fn note_instant(&mut self) {
        let fragmentation = *self.space.fragmentation_mut();
        self.now.fragmentation = fragmentation;
        debug_assert_eq!(
            fragmentation.live + fragmentation.causes.iter().copied().sum(),
            fragmentation.reserved
        );
        if fragmentation.live > self.peak_live.fragmentation.live
            || self.peak_live.fragmentation.reserved.is_zero()
        {
            self.peak_live = self.now;
        }
        let peak = &self.peak_reserved.fragmentation;
        if (fragmentation.reserved, fragmentation.live) > (peak.reserved, peak.live) {
            self.peak_reserved = self.now;
        }
        self.peak_requested = self.peak_requested.max(self.now.requested);
        let values = curves(&fragmentation, self.now.paused);
        self.levels.add(u64::from(self.now.instant), &values);
        if let Some(listed) = &mut self.listed {
            let difference = difference(&fragmentation, listed.space.fragmentation_mut());
            if difference != listed.difference {
                let change = std::array::from_fn(|part| difference[part] - listed.difference[part]);
                let number = listed.distinct.number(change);
                listed.changes.push((self.now.instant, number));
                listed.difference = difference;
            }
        }
    }
}

/// Returns the stream with the most requested bytes; among equals, the one with the lowest handle.
fn main_stream(trace: &Trace) -> Stream {
    let mut streams = Numbering::default();
    let mut sums: Vec<u64> = Vec::new();
    let mut add = |stream: Stream, bytes: Bytes| {
        let number = streams.number(stream) as usize;
        sums.resize(sums.len().max(number + 1), 0);
        sums[number] = sums[number].saturating_add(bytes.get());
    };
    for block in &trace.initial.blocks {
        add(block.stream, block.requested);
    }
    for recorded in &trace.events {
        if recorded.event.action == Action::Alloc {
            add(recorded.event.stream, recorded.event.size);
        }
    }
    let sums = streams.into_values().into_iter().zip(sums);
    let most = sums.max_by_key(|&(stream, sum)| (sum, std::cmp::Reverse(stream)));
    most.map_or(Stream::DEFAULT, |(stream, _)| stream)
}

/// Adds a block to its parts of the reserved bytes, or subtracts it.
fn count_block(fragmentation: &mut Fragmentation, block: &Block, is_there: bool) {
    if block.freed == NEVER {
        let live = block.live_bytes();
        change(&mut fragmentation.live, live, is_there);
        let rounding = fragmentation.of_cause_mut(Cause::Rounding);
        change(rounding, block.size - live, is_there);
    } else {
        let waiting = fragmentation.of_cause_mut(Cause::WaitingForEvents);
        change(waiting, block.size, is_there);
    }
}

fn change(bytes: &mut Bytes, by: Bytes, is_more: bool) {
    if is_more { *bytes += by } else { *bytes -= by }
}

/// Returns the difference of the live bytes and of each cause.
fn difference(fragmentation: &Fragmentation, other: &Fragmentation) -> [i64; FRAGMENTATION_PARTS] {
    let parts = |fragmentation: &Fragmentation| {
        let mut parts = [fragmentation.live; FRAGMENTATION_PARTS];
        parts[1..].copy_from_slice(&fragmentation.causes);
        parts
    };
    let (parts, others) = (parts(fragmentation), parts(other));
    std::array::from_fn(|part| parts[part].get().cast_signed() - others[part].get().cast_signed())
}

/// Returns the values of the curves.
fn curves(fragmentation: &Fragmentation, paused: Bytes) -> [u64; CURVES] {
    let mut values = [0; CURVES];
    values[0] = fragmentation.reserved.get();
    values[1] = fragmentation.live.get();
    values[CURVES - 1] = paused.get();
    for (value, bytes) in values[2..].iter_mut().zip(fragmentation.causes) {
        *value = bytes.get();
    }
    values
}

/// Returns the page size of large expandable segments, as far as the recording shows it.
pub(crate) fn large_page(trace: &Trace) -> Bytes {
    let strategy: Option<Config> = trace.settings.strategy.raw().parse().ok();
    strategy.map_or_else(
        || trace.config_as_understood().0.large_segment_size,
        |strategy| strategy.large_page(),
    )
}
