//! The limit on requests that move frames, so that a job does not move frames for ever.
//!
//! A job that repeats moves its frames once and finds their views again. Requests of random sizes find none: each moves
//! frames that a later one misses. Such a job gets new frames, until its requests find enough that are idle.
//!
//! The two differ in how many requests move frames, not in how many frames move. When llama_varlen draws a larger shape,
//! it moves each frame up to three times in one step, in a few requests.

use std::time::Duration;

use crate::units::Bytes;

/// The number of requests that may move frames, or the number of frames if that is higher. None of eleven jobs makes
/// more than one for three frames. Servers of requests of random lengths, with 850 frames, make 4,000 in 13 s.
const FREE: u32 = 3000;

/// After that, one request may move frames in each such time. The driver takes about 100 us for two frames.
const EACH: Duration = Duration::from_millis(10);

/// The most that a job holds beyond its own memory, if frames do not move: a quarter. 1,000 blocks of random sizes up
/// to 32 MiB need a tenth. Without it, streams that repeat requests in turn would each get their own memory.
const MORE_PART: u64 = 4;

/// The requests that moved frames.
#[derive(Debug, Default)]
pub(super) struct Moves {
    /// [`EACH`] for each of them, less the time that passed. At most `most`.
    owed: Duration,
    most: Duration,
    /// When `owed` was reduced last.
    now: Duration,
    /// The most active bytes at any miss.
    used: Bytes,
}

impl Moves {
    /// Returns whether a request may move frames. `frames` is the number of frames.
    pub(super) fn allow(&mut self, now: Duration, frames: usize) -> bool {
        let passed = now.saturating_sub(self.now);
        self.now += passed;
        // 2^32 frames would have 8 PiB.
        let count = u32::try_from(frames).unwrap_or(u32::MAX);
        self.most = EACH * count.max(FREE);
        self.owed = self.owed.saturating_sub(passed).min(self.most);
        self.owed + EACH <= self.most
    }

    /// Records that a request moved frames.
    pub(super) fn add(&mut self) {
        self.owed = (self.owed + EACH).min(self.most);
    }

    /// Returns whether a job that uses `used` bytes may hold `held` bytes to avoid moving frames.
    pub(super) fn may_hold(&mut self, held: Bytes, used: Bytes) -> bool {
        self.used = self.used.max(used);
        held <= self.used.saturating_add(Bytes(self.used.get() / MORE_PART))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Returns how many requests may move frames at a time.
    fn allowed(moves: &mut Moves, now: Duration, frames: usize) -> u32 {
        let mut count = 0;
        while moves.allow(now, frames) {
            moves.add();
            count += 1;
        }
        count
    }

    #[test]
    fn some_requests_may_move_frames_and_then_a_part_of_the_time() {
        for (frames, expected) in [(0, FREE), (3000, 3000), (4000, 4000)] {
            let mut moves = Moves::default();
            assert_eq!(allowed(&mut moves, SECOND, frames), expected);
            assert_eq!(allowed(&mut moves, SECOND * 2, frames), 100);
            assert_eq!(allowed(&mut moves, SECOND, frames), 0, "time goes on");
            assert_eq!(allowed(&mut moves, SECOND * 2 + EACH / 2, frames), 0);
            assert_eq!(allowed(&mut moves, SECOND * 2 + EACH, frames), 1);
            assert_eq!(allowed(&mut moves, SECOND * 1000, frames), expected);
        }
        let mut moves = Moves::default();
        assert!(moves.allow(Duration::MAX, usize::MAX));
        let mut moves = Moves::default();
        assert_eq!(allowed(&mut moves, SECOND, 40_000), 40_000);
        assert_eq!(allowed(&mut moves, SECOND * 2, 0), 0);
        assert_eq!(allowed(&mut moves, SECOND * 3, 0), 100, "of fewer frames");
    }

    /// Where there is no other memory, frames move however often.
    #[test]
    fn moves_that_must_be_are_not_held_against_a_job_for_long() {
        let mut moves = Moves::default();
        assert_eq!(allowed(&mut moves, SECOND, 1), FREE);
        (0..1_000_000).for_each(|_| moves.add());
        assert_eq!(allowed(&mut moves, SECOND * 31, 1), FREE);
    }

    #[test]
    fn no_job_holds_a_quarter_more_than_it_used() {
        let mut moves = Moves::default();
        assert!(moves.may_hold(Bytes(125), Bytes(100)));
        assert!(moves.may_hold(Bytes(125), Bytes(40)), "it used more before");
        assert!(!moves.may_hold(Bytes(126), Bytes(40)));
        assert!(moves.may_hold(Bytes(u64::MAX), Bytes(u64::MAX)));
    }
}
