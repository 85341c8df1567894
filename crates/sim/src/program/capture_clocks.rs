//! The model's view of captured graphs: vector clocks, where the simulated driver and the allocator have nodes.

use std::collections::BTreeMap;

use lowtide_core::Stream;

/// The streams that are being captured.
#[derive(Debug, Default)]
pub(super) struct CaptureClocks {
    clocks: BTreeMap<Stream, CaptureClock>,
    /// The number of captures that ever began.
    begun: u64,
}

/// For each stream, how much of its captured work precedes a stream's next work.
#[derive(Clone, Default, Debug)]
struct CaptureClock {
    capture: u64,
    pieces: BTreeMap<Stream, u64>,
}

/// The captured work of some streams at one moment.
#[derive(Debug)]
pub(super) struct CapturedWork {
    /// The number of captures that had begun.
    begun: u64,
    /// The work, if all of it was in one capture.
    clock: Option<CaptureClock>,
}

impl CaptureClocks {
    /// Begins a capture, unless the stream is in one.
    pub(super) fn begin(&mut self, stream: Stream) {
        self.begun += 1;
        let capture = self.begun;
        let clock = || CaptureClock {
            capture,
            ..CaptureClock::default()
        };
        self.clocks.entry(stream).or_insert_with(clock);
    }

    /// Ends the capture that began first, in all its streams. Returns one of them, if there is one.
    pub(super) fn end_first(&mut self) -> Option<Stream> {
        let first = self.clocks.iter().min_by_key(|(_, clock)| clock.capture);
        let (stream, capture) = first.map(|(&stream, clock)| (stream, clock.capture))?;
        self.clocks.retain(|_, clock| clock.capture != capture);
        Some(stream)
    }

    /// Returns the capture that a stream is in.
    pub(super) fn capture_of(&self, stream: Stream) -> Option<u64> {
        self.clocks.get(&stream).map(|clock| clock.capture)
    }

    /// Adds work to the stream's clock, if the stream is being captured.
    pub(super) fn launch(&mut self, stream: Stream) {
        if let Some(clock) = self.clocks.get_mut(&stream) {
            *clock.pieces.entry(stream).or_default() += 1;
        }
    }

    /// Returns whether a stream may wait for another.
    pub(super) fn may_wait(&self, stream: Stream, other: Stream) -> bool {
        let own = self.capture_of(stream);
        own.is_none() || self.capture_of(other) == own
    }

    /// Makes a stream's next work depend on the captured work of another.
    pub(super) fn wait(&mut self, stream: Stream, other: Stream) {
        let Some(others) = self.clocks.get(&other).cloned() else {
            return;
        };
        let clock = self.clocks.entry(stream).or_default();
        clock.capture = others.capture;
        for (worker, count) in others.pieces {
            let known = clock.pieces.entry(worker).or_default();
            *known = count.max(*known);
        }
    }

    /// Returns the captured work of some streams so far.
    pub(super) fn work_of(&self, streams: impl Iterator<Item = Stream>) -> CapturedWork {
        CapturedWork {
            begun: self.begun,
            clock: self.clock_of(streams),
        }
    }

    /// Returns the clock of some streams' work, if there are any and all of them are in one capture.
    fn clock_of(&self, mut streams: impl Iterator<Item = Stream>) -> Option<CaptureClock> {
        let sum = streams.try_fold(CaptureClock::default(), |mut sum, stream| {
            let clock = self.clocks.get(&stream)?;
            let is_same = sum.pieces.is_empty() || sum.capture == clock.capture;
            sum.capture = clock.capture;
            let own = clock.pieces.get(&stream).copied().unwrap_or(0);
            sum.pieces.insert(stream, own);
            is_same.then_some(sum)
        });
        sum.filter(|sum| !sum.pieces.is_empty())
    }

    /// Returns whether all of `work` precedes a stream's next work: its captures have ended, or the order within
    /// one capture says so.
    pub(super) fn is_over(&self, stream: Stream, work: &CapturedWork) -> bool {
        let mut captures = self.clocks.values().map(|clock| clock.capture);
        let clocks = work.clock.as_ref().zip(self.clocks.get(&stream));
        captures.all(|capture| capture > work.begun)
            || clocks.is_some_and(|(work, known)| work.comes_before(known))
    }
}

impl CaptureClock {
    fn comes_before(&self, later: &CaptureClock) -> bool {
        let known = |worker| later.pieces.get(worker).copied().unwrap_or(0);
        let mut pieces = self.pieces.iter();
        self.capture == later.capture && pieces.all(|(worker, &count)| known(worker) >= count)
    }
}
