//! How often frames may move: a guard against requests that move frames for ever.
//!
//! A job that repeats moves its frames once and finds their views again. Requests of random sizes find none: each moves
//! frames that a later one misses. Such a job gets new frames, until its requests find enough that are idle.

use std::time::Duration;

/// What a move takes the driver: a map and an unmap, on an H200.
const MOVE: Duration = Duration::from_micros(42);

/// A frame may move this often, on average. In eleven recorded jobs, frames move 1.2 times at most until the job repeats.
const MOVES_OF_FRAME: u32 = 2;

/// However few frames there are, moves may take so long. With 100 ms, jobs of 1.7 GiB that serve requests of random lengths
/// hold 3 % more.
const LEAST: Duration = Duration::from_millis(250);

/// Beyond that, moves may take this part of the time: 1 %.
const PART: u32 = 100;

/// How long the driver took for moves.
#[derive(Debug, Default)]
pub(super) struct Moves {
    /// Less the part of the time that they may take.
    taken: Duration,
    /// Until when that was counted.
    now: Duration,
}

impl Moves {
    /// Returns whether `wanted` frames may move, of the `frames` that there are.
    pub(super) fn allow(&mut self, now: Duration, frames: usize, wanted: usize) -> bool {
        let passed = now.saturating_sub(self.now);
        self.taken = self.taken.saturating_sub(passed / PART);
        self.now = now;
        self.taken + cost(wanted) <= LEAST.max(cost(frames) * MOVES_OF_FRAME)
    }

    /// Notes that frames moved.
    pub(super) fn add(&mut self, moved: usize) {
        self.taken += cost(moved);
    }
}

/// Returns what moves of frames take.
fn cost(frames: usize) -> Duration {
    // Nobody has 2^32 frames: they have 8 PiB.
    MOVE * u32::try_from(frames).unwrap_or(u32::MAX)
}
