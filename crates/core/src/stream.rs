//! Blocks that other streams used, and the events that show when those streams are done.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::block::BlockId;
use crate::driver::{CapturePoint, Driver, DriverError, EventHandle};
use crate::units::Stream;

/// A stream that used another stream's block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Use {
    stream: Stream,
    /// The capture that the stream was in at every `record_stream` call for the block, if it was the same one. As
    /// in PyTorch, work from before the stream joined the capture is the program's own responsibility unless it
    /// called `record_stream` then.
    captured_in: Option<u64>,
}

/// A block that was freed during a capture, and the point in it after which no work uses it.
type Ordered = (BlockId, CapturePoint);

/// Which streams used which blocks, and which freed blocks wait for them.
///
/// Each stream has a queue, because the events of one stream pass in order. The first event that has not passed
/// ends the search, and a busy stream does not delay the blocks of another.
#[derive(Debug, Default)]
pub(crate) struct StreamUses {
    uses: HashMap<BlockId, Vec<Use>>,
    /// In the order in which the streams were first waited for.
    queues: Vec<(Stream, VecDeque<(EventHandle, BlockId)>)>,
    /// How many events each block in the queues waits for; never zero.
    outstanding: HashMap<BlockId, usize>,
    /// Blocks freed during a capture, in which no event may be recorded that is queried later.
    deferred: Vec<BlockId>,
    /// Like `deferred`, for blocks whose uses are all in one graph; the graph shows when they end. By the block's
    /// stream.
    ordered: BTreeMap<Stream, Vec<Ordered>>,
    /// Blocks that wait for no more events.
    passed: VecDeque<BlockId>,
}

impl StreamUses {
    /// Returns whether no freed block waits.
    #[inline]
    pub(crate) fn none_wait(&self) -> bool {
        self.outstanding.is_empty()
            && self.deferred.is_empty()
            && self.ordered.is_empty()
            && self.passed.is_empty()
    }

    /// Records that work in `stream` uses the block, captured or not.
    pub(crate) fn add(&mut self, block: BlockId, stream: Stream, captured_in: Option<u64>) {
        let uses = self.uses.entry(block).or_default();
        match uses.iter_mut().find(|known| known.stream == stream) {
            Some(known) if known.captured_in == captured_in => {}
            Some(known) => known.captured_in = None,
            None => uses.push(Use {
                stream,
                captured_in,
            }),
        }
    }

    /// Defers a block of stream `own` that was freed during a capture until the captures have ended. If it `reuses`
    /// memory, [`StreamUses::pass_ordered`] may end the wait earlier.
    pub(crate) fn defer<D: Driver>(
        &mut self,
        driver: &mut D,
        block: BlockId,
        own: Stream,
        reuses: bool,
    ) {
        let uses = self.uses.remove(&block).unwrap_or_default();
        // A graph orders its own work. Work outside the graph needs an event.
        let is_in_graph = |known: &Use| {
            known.captured_in.is_some() && driver.capture_of(known.stream) == known.captured_in
        };
        let (in_graph, running): (Vec<Use>, Vec<Use>) = uses.into_iter().partition(is_in_graph);
        let has_all = reuses && running.is_empty();
        if !running.is_empty() {
            self.uses.insert(block, running);
        }
        match has_all.then(|| last_use(driver, own, &in_graph)).flatten() {
            Some(point) => self.ordered.entry(own).or_default().push((block, point)),
            None => {
                debug_assert!(!self.deferred.contains(&block), "a block is deferred once");
                self.deferred.push(block);
            }
        }
    }

    /// Returns whether blocks of a stream wait for the order of a graph.
    pub(crate) fn has_ordered(&self, stream: Stream) -> bool {
        self.ordered.contains_key(&stream)
    }

    /// Ends the wait of a stream's blocks that were freed in a capture and whose uses are over.
    pub(crate) fn pass_ordered(&mut self, stream: Stream, is_over: impl Fn(&CapturePoint) -> bool) {
        let Some(waiting) = self.ordered.get_mut(&stream) else {
            return;
        };
        let passed = waiting.extract_if(.., |(_, point)| is_over(point));
        self.passed.extend(passed.map(|(block, _)| block));
        if waiting.is_empty() {
            self.ordered.remove(&stream);
        }
        debug_assert!(self.ordered.values().all(|waiting| !waiting.is_empty()));
    }

    /// Records an event in every stream that used a freed block. The block then waits for all of them.
    ///
    /// # Errors
    ///
    /// The driver's error; the block's uses are then unchanged, and it waits for no event.
    pub(crate) fn wait_for<D: Driver>(
        &mut self,
        driver: &mut D,
        block: BlockId,
    ) -> Result<(), DriverError> {
        let uses = self.uses.remove(&block).unwrap_or_default();
        let mut events = Vec::with_capacity(uses.len());
        for &Use { stream, .. } in &uses {
            match driver.record_event(stream) {
                Ok(event) => events.push((stream, event)),
                Err(error) => {
                    for (_, event) in events {
                        driver.release_event(event);
                    }
                    self.uses.insert(block, uses);
                    return Err(error);
                }
            }
        }
        if events.is_empty() {
            self.passed.push_back(block);
            return Ok(());
        }
        let before = self.outstanding.insert(block, events.len());
        debug_assert_eq!(before, None, "a block waits once");
        for (stream, event) in events {
            self.queue(stream).push_back((event, block));
        }
        Ok(())
    }

    /// Records the events of blocks that were freed during captures that have ended.
    pub(crate) fn end_deferral<D: Driver>(&mut self, driver: &mut D) -> Result<(), DriverError> {
        let ordered = std::mem::take(&mut self.ordered).into_values().flatten();
        self.deferred.extend(ordered.map(|(block, _)| block));
        while let Some(&block) = self.deferred.last() {
            self.wait_for(driver, block)?;
            self.deferred.pop();
        }
        Ok(())
    }

    /// Queries, for each stream, which of its events have passed.
    pub(crate) fn poll<D: Driver>(&mut self, driver: &mut D) -> Result<(), DriverError> {
        for index in 0..self.queues.len() {
            while let Some(&(event, _)) = self.queues[index].1.front() {
                if !driver.query_event(event)? {
                    break;
                }
                self.pass((index, 0), driver);
            }
        }
        self.queues.retain(|(_, queue)| !queue.is_empty());
        Ok(())
    }

    /// Waits until every event has passed that a selected block waits for.
    pub(crate) fn synchronize<D: Driver>(
        &mut self,
        driver: &mut D,
        is_meant: impl Fn(BlockId) -> bool,
    ) -> Result<(), DriverError> {
        for index in 0..self.queues.len() {
            let mut place = 0;
            while let Some(&(event, block)) = self.queues[index].1.get(place) {
                if is_meant(block) {
                    driver.synchronize_event(event)?;
                    self.pass((index, place), driver);
                } else {
                    place += 1;
                }
            }
        }
        self.queues.retain(|(_, queue)| !queue.is_empty());
        Ok(())
    }

    /// Returns the other streams that use a block.
    pub(crate) fn streams_of(&self, block: BlockId) -> impl Iterator<Item = Stream> {
        let uses = self.uses.get(&block).into_iter().flatten();
        uses.map(|known| known.stream)
    }

    /// Returns the blocks that other streams use, in no particular order.
    pub(crate) fn used(&self) -> impl Iterator<Item = BlockId> {
        self.uses.keys().copied()
    }

    /// Removes the record that other streams use a block.
    pub(crate) fn forget(&mut self, block: BlockId) {
        self.uses.remove(&block);
    }

    /// Ends the wait of a freed block, to be reclaimed at the next check.
    pub(crate) fn wait_no_more(&mut self, block: BlockId) {
        debug_assert!(!self.outstanding.contains_key(&block));
        debug_assert!(!self.passed.contains(&block), "a block passes once");
        self.passed.push_back(block);
    }

    /// Returns a block that waits for no more events, and leaves it in the queue.
    pub(crate) fn first_passed(&self) -> Option<BlockId> {
        self.passed.front().copied()
    }

    /// Removes the block that [`StreamUses::first_passed`] returned.
    pub(crate) fn remove_first_passed(&mut self) {
        let passed = self.passed.pop_front();
        debug_assert!(passed.is_some_and(|block| !self.uses.contains_key(&block)));
    }

    /// Returns the freed blocks that wait, in no particular order.
    pub(crate) fn waiting(&self) -> Vec<BlockId> {
        let outstanding = self.outstanding.keys();
        let ordered = self.ordered.values().flatten();
        outstanding
            .chain(&self.deferred)
            .chain(ordered.map(|(block, _)| block))
            .chain(&self.passed)
            .copied()
            .collect()
    }

    fn queue(&mut self, stream: Stream) -> &mut VecDeque<(EventHandle, BlockId)> {
        let known = self.queues.iter().position(|&(other, _)| other == stream);
        let index = known.unwrap_or_else(|| {
            self.queues.push((stream, VecDeque::new()));
            self.queues.len() - 1
        });
        &mut self.queues[index].1
    }

    /// Removes an event that has passed from its queue.
    fn pass<D: Driver>(&mut self, (index, place): (usize, usize), driver: &mut D) {
        let passed = self.queues[index].1.remove(place);
        let (event, block) = passed.expect("the caller saw an event in the queue");
        driver.release_event(event);
        let outstanding = self
            .outstanding
            .get_mut(&block)
            .expect("queued blocks are counted");
        debug_assert!(*outstanding > 0);
        *outstanding -= 1;
        if *outstanding == 0 {
            debug_assert!(!self.passed.contains(&block), "a block passes once");
            self.outstanding.remove(&block);
            self.passed.push_back(block);
        }
    }
}

/// Returns the point after which no work of a block's own stream or its other users uses it, if one capture has all
/// of it.
fn last_use<D: Driver>(driver: &mut D, own: Stream, uses: &[Use]) -> Option<CapturePoint> {
    let mut last_use = driver.capture_point(own)?;
    for known in uses {
        let point = driver.capture_point(known.stream)?;
        if point.capture != last_use.capture {
            return None;
        }
        last_use.after.extend(point.after);
    }
    // As in PyTorch, a block freed before any work was captured waits for the capture's end.
    (!last_use.after.is_empty()).then_some(last_use)
}
