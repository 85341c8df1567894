//! Blocks that other streams used, and the events that say when those streams are done.

use std::collections::{HashMap, VecDeque};

use crate::block::BlockId;
use crate::driver::{CapturePoint, Driver, DriverError, EventHandle};
use crate::units::Stream;

/// A stream that used a block which belongs to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Use {
    stream: Stream,
    /// Only graph captures used it there. A captured graph orders its own streams, so once the
    /// capture has ended no event is needed for this one.
    only_captured: bool,
}

/// A block that was freed during a capture.
#[derive(Debug)]
struct Deferred {
    block: BlockId,
    /// Where its last uses are over, if only work of one capture used it.
    last_use: Option<CapturePoint>,
}

/// Which streams used which blocks, and which freed blocks wait for them.
///
/// There is a queue for each stream, because the events of one stream pass in order: the first that
/// has not passed ends the search, and a busy stream does not hold up the blocks of another.
#[derive(Debug, Default)]
pub(crate) struct StreamUses {
    uses: HashMap<BlockId, Vec<Use>>,
    /// In the order in which the streams were first waited for.
    queues: Vec<(Stream, VecDeque<(EventHandle, BlockId)>)>,
    /// How many events each block in the queues waits for; never zero.
    outstanding: HashMap<BlockId, usize>,
    /// Freed during a capture, in which no event may be recorded that is to be queried.
    deferred: Vec<Deferred>,
    /// Waits for nothing any more.
    passed: VecDeque<BlockId>,
}

impl StreamUses {
    /// Returns whether no freed block waits.
    #[inline]
    pub(crate) fn none_wait(&self) -> bool {
        self.outstanding.is_empty() && self.deferred.is_empty() && self.passed.is_empty()
    }

    /// Notes that work in `stream` uses the block.
    pub(crate) fn add(&mut self, block: BlockId, stream: Stream, capturing: bool) {
        let uses = self.uses.entry(block).or_default();
        match uses.iter_mut().find(|known| known.stream == stream) {
            Some(known) => known.only_captured &= capturing,
            None => uses.push(Use {
                stream,
                only_captured: capturing,
            }),
        }
    }

    /// Keeps a freed block until the capture has ended, or [`StreamUses::pass_ordered`] lets it go.
    pub(crate) fn defer(&mut self, block: BlockId, last_use: Option<CapturePoint>) {
        self.deferred.push(Deferred { block, last_use });
    }

    /// Returns where the captured uses of a block are over, in its own stream and in all others.
    /// `None` unless one capture has all of it, which alone says when it is over.
    pub(crate) fn last_use<D: Driver>(
        &self,
        driver: &mut D,
        block: BlockId,
        own: Stream,
    ) -> Option<CapturePoint> {
        let uses = self.uses.get(&block)?;
        let mut last_use = driver.capture_point(own)?;
        for known in uses {
            let point = driver.capture_point(known.stream)?;
            if !known.only_captured || point.capture != last_use.capture {
                return None;
            }
            last_use.after.extend(point.after);
        }
        // As in PyTorch, what is freed before any work was captured waits for the capture's end.
        (!last_use.after.is_empty()).then_some(last_use)
    }

    /// Lets the blocks wait no more that were freed in a capture and whose last uses are over.
    pub(crate) fn pass_ordered(&mut self, is_over: impl Fn(BlockId, &CapturePoint) -> bool) {
        let is_over = |deferred: &mut Deferred| {
            let last_use = deferred.last_use.as_ref();
            last_use.is_some_and(|last_use| is_over(deferred.block, last_use))
        };
        for Deferred { block, .. } in self.deferred.extract_if(.., is_over) {
            self.uses.remove(&block);
            self.passed.push_back(block);
        }
    }

    /// Records an event in every stream that used a freed block, which then waits for all of them.
    ///
    /// # Errors
    ///
    /// What the driver said; the block's uses are then as before, and it waits for nothing.
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
        self.outstanding.insert(block, events.len());
        for (stream, event) in events {
            self.queue(stream).push_back((event, block));
        }
        Ok(())
    }

    /// Records the events of blocks that were freed during a capture.
    pub(crate) fn end_deferral<D: Driver>(&mut self, driver: &mut D) -> Result<(), DriverError> {
        while let Some(&Deferred { block, .. }) = self.deferred.last() {
            if let Some(uses) = self.uses.get_mut(&block) {
                uses.retain(|known| !known.only_captured);
            }
            self.wait_for(driver, block)?;
            self.deferred.pop();
        }
        Ok(())
    }

    /// Asks the driver for each stream which of its events have passed.
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

    /// Waits until every event has passed that a block waits for which is meant.
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

    /// Returns the streams that use a block and that no graph orders.
    pub(crate) fn streams_of(&self, block: BlockId) -> impl Iterator<Item = Stream> {
        let uses = self.uses.get(&block).into_iter().flatten();
        uses.filter(|known| !known.only_captured)
            .map(|known| known.stream)
    }

    /// Forgets that other streams use a block.
    pub(crate) fn forget(&mut self, block: BlockId) {
        self.uses.remove(&block);
    }

    /// Lets a freed block wait for nothing but the next look.
    pub(crate) fn wait_no_more(&mut self, block: BlockId) {
        self.passed.push_back(block);
    }

    /// Returns a block that waits for nothing any more, without forgetting it.
    pub(crate) fn first_passed(&self) -> Option<BlockId> {
        self.passed.front().copied()
    }

    /// Forgets the block that [`StreamUses::first_passed`] returned.
    pub(crate) fn remove_first_passed(&mut self) {
        self.passed.pop_front();
    }

    /// Returns the blocks that were freed and wait, in no particular order.
    pub(crate) fn waiting(&self) -> Vec<BlockId> {
        let outstanding = self.outstanding.keys();
        let deferred = self.deferred.iter().map(|deferred| &deferred.block);
        outstanding
            .chain(deferred)
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

    /// Takes an event that has passed out of its place in a queue.
    fn pass<D: Driver>(&mut self, (index, place): (usize, usize), driver: &mut D) {
        let passed = self.queues[index].1.remove(place);
        let (event, block) = passed.expect("the caller saw an event in the queue");
        driver.release_event(event);
        let outstanding = self
            .outstanding
            .get_mut(&block)
            .expect("queued blocks are counted");
        *outstanding -= 1;
        if *outstanding == 0 {
            self.outstanding.remove(&block);
            self.passed.push_back(block);
        }
    }
}
