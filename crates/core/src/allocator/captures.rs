//! Graph captures: no event is queried, and what is freed waits for the end or for the graph's own order.

use crate::block::BlockId;
use crate::driver::Driver;
use crate::error::AllocError;
use crate::units::Stream;

use super::DeviceAllocator;

impl<D: Driver> DeviceAllocator<D> {
    /// Says that a stream is being captured into a graph: no event is queried until
    /// [`DeviceAllocator::capture_end`].
    pub fn capture_begin(&mut self) {
        self.captures += 1;
    }

    /// Says that a capture has ended. With `graph_capture_record_stream_reuse` what it used and freed is
    /// free again after the last one; otherwise the next request sees to that.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] when an event cannot be recorded for work outside of the captures. They have
    /// ended, and the memory waits for the next request.
    pub fn capture_end(&mut self) -> Result<(), AllocError> {
        self.captures = self.captures.saturating_sub(1);
        if self.captures == 0 {
            self.order.forget();
        }
        if self.captures > 0 || !self.reuses_in_capture {
            return Ok(());
        }
        self.uses.end_deferral(&mut self.heap.driver)?;
        Ok(self.reclaim_passed()?)
    }

    /// Makes blocks free before a request of `stream`: those whose events have passed or, in a capture,
    /// those that the graph's order allows, which are blocks of this stream.
    #[inline(never)]
    pub(super) fn reclaim_for(&mut self, stream: Stream) -> Result<(), AllocError> {
        if self.captures == 0 || !self.reuses_in_capture {
            return self.process_events();
        }
        let (blocks, domains) = (&self.heap.blocks, &self.heap.domains);
        if let Some(is_before) = self.order.follow(&mut self.heap.driver, stream) {
            self.uses.pass_ordered(|block, last_use| {
                let owner = domains.domain(blocks.get(block).domain).stream;
                owner == stream && is_before(last_use)
            });
        }
        Ok(self.reclaim_passed()?)
    }

    /// Keeps a block that was freed in a capture.
    pub(super) fn defer(&mut self, id: BlockId) {
        let driver = &mut self.heap.driver;
        let domain = self.heap.blocks.get(id).domain;
        let own = self.heap.domains.domain(domain).stream;
        let last_use = self
            .reuses_in_capture
            .then(|| self.uses.last_use(driver, id, own));
        self.uses.defer(id, last_use.flatten());
    }

    /// Returns whether work that is now put into `stream` goes into a graph. Without a capture, no driver is
    /// asked; in one, other streams may still run.
    pub(super) fn is_captured(&mut self, stream: Stream) -> bool {
        self.captures > 0 && self.heap.driver.capture_point(stream).is_some()
    }
}
