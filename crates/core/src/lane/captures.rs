//! Graph captures: no event is queried, and what is freed waits for the end or for the graph's own order.

use crate::block::BlockId;
use crate::driver::Driver;
use crate::error::AllocError;
use crate::physical::Memory;
use crate::units::Stream;

use super::Lane;

impl<M: Memory> Lane<M> {
    /// Says that a stream is being captured into a graph: no event is queried until
    /// [`Lane::capture_end`].
    pub fn capture_begin(&mut self) {
        self.heap.captures += 1;
    }

    /// Says that a capture has ended. With `graph_capture_record_stream_reuse` what it used and freed is
    /// free again after the last one; otherwise the next request sees to that.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] when an event cannot be recorded for work outside of the captures. They have
    /// ended, and the next request tries again for the memory that is left.
    pub fn capture_end(&mut self) -> Result<(), AllocError> {
        self.heap.captures = self.heap.captures.saturating_sub(1);
        if self.heap.captures > 0 {
            return Ok(());
        }
        debug_assert_eq!(self.heap.captures, 0);
        self.order.forget();
        if self.config.reuses_in_capture() {
            self.uses
                .end_deferral(self.memory.physical_mut().driver_mut())?;
            self.reclaim_passed()?;
        }
        Ok(())
    }

    /// Makes blocks free before a request of `stream`: those whose events have passed or, in a capture,
    /// those that the graph's order allows, which are blocks of this stream.
    #[inline(never)]
    pub(super) fn reclaim_for(&mut self, stream: Stream) -> Result<(), AllocError> {
        if self.heap.captures == 0 || !self.config.reuses_in_capture() {
            return self.process_events();
        }
        if self.uses.has_ordered(stream)
            && let Some(is_before) = self
                .order
                .follow(self.memory.physical_mut().driver_mut(), stream)
        {
            self.uses.pass_ordered(stream, is_before);
        }
        Ok(self.reclaim_passed()?)
    }

    /// Keeps a block that was freed in a capture.
    pub(super) fn defer(&mut self, id: BlockId) {
        debug_assert!(
            self.heap.captures > 0,
            "outside of captures events are recorded"
        );
        let domain = self.heap.blocks.get(id).domain;
        let own = self.heap.domains.domain(domain).stream;
        let mut physical = self.memory.physical_mut();
        let reuses = self.config.reuses_in_capture();
        self.uses.defer(physical.driver_mut(), id, own, reuses);
    }

    /// Returns the capture that work goes into which is now put into `stream`. Outside of captures no driver is
    /// asked; in one, other streams may still run.
    pub(super) fn capture_of(&mut self, stream: Stream) -> Option<u64> {
        if self.heap.captures == 0 {
            return None;
        }
        self.memory.physical_mut().driver_mut().capture_of(stream)
    }
}
