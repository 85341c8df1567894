//! Graph captures. Events are not queried during one. Blocks freed in it wait for its end or for the graph's order.

use crate::block::BlockId;
use crate::driver::Driver;
use crate::error::AllocError;
use crate::physical::Memory;
use crate::units::Stream;

use super::Lane;

impl<M: Memory> Lane<M> {
    /// Begins a capture. No event is queried until [`Lane::capture_end`].
    pub fn capture_begin(&mut self) {
        self.heap.captures += 1;
    }

    /// Ends a capture. After the last one, blocks that were freed in captures are free again: at once with
    /// `graph_capture_record_stream_reuse`, otherwise at the next request.
    ///
    /// # Errors
    ///
    /// [`AllocError::Driver`] when an event cannot be recorded for work outside the captures. The captures have still
    /// ended. The next request tries again.
    pub fn capture_end(&mut self) -> Result<(), AllocError> {
        self.heap.captures = self.heap.captures.saturating_sub(1);
        if self.heap.captures > 0 {
            return Ok(());
        }
        debug_assert_eq!(self.heap.captures, 0);
        self.order.forget();
        if self.config.options().reuses_in_capture() {
            self.uses
                .end_deferral(self.memory.physical_mut().driver_mut())?;
            self.reclaim_passed()?;
        }
        Ok(())
    }

    /// Puts pending blocks to the strategy before a request of `stream`: those whose events have passed or, in a
    /// capture, those of this stream that the graph's order allows.
    #[inline(never)]
    pub(super) fn reclaim_for(&mut self, stream: Stream) -> Result<(), AllocError> {
        if self.heap.captures == 0 || !self.config.options().reuses_in_capture() {
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

    /// Defers a block that was freed in a capture.
    pub(super) fn defer(&mut self, id: BlockId) {
        debug_assert!(
            self.heap.captures > 0,
            "outside of captures events are recorded"
        );
        let domain = self.heap.blocks.get(id).domain;
        let own = self.heap.domains.domain(domain).stream;
        let mut physical = self.memory.physical_mut();
        let reuses = self.config.options().reuses_in_capture();
        self.uses.defer(physical.driver_mut(), id, own, reuses);
    }

    /// Returns the capture that `stream` is in, if any. During a capture of another stream it may be in none. Calls the
    /// driver only during a capture.
    pub(super) fn capture_of(&mut self, stream: Stream) -> Option<u64> {
        if self.heap.captures == 0 {
            return None;
        }
        self.memory.physical_mut().driver_mut().capture_of(stream)
    }
}
