//! What is counted about a region's memory.

use std::time::Duration;

use lowtide_core::Bytes;

use crate::state::RegionState;

/// The figures of one region on one device. Sums are since the region was first entered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionFigures {
    /// Where the region is.
    pub state: RegionState,
    /// Physical memory on the device, mapped or not; while the region is on its way, what it was before.
    pub mapped: Bytes,
    /// The segments whose memory is away; also those that nothing uses any more, which do not come back:
    /// [`RegionMemory::needed_to_resume`](crate::RegionMemory::needed_to_resume) is without them.
    pub paused: Bytes,
    /// What is kept in the host's memory.
    pub host: Bytes,
    /// What is kept on disk.
    pub disk: Bytes,
    /// How often it was paused.
    pub pauses: u64,
    /// How often it was resumed.
    pub resumes: u64,
    /// What was copied away.
    pub saved: Bytes,
    /// What was copied back.
    pub restored: Bytes,
    /// How long pausing took, the wait for the device included.
    pub pause_time: Duration,
    /// How long resuming took.
    pub resume_time: Duration,
    /// How long copying away took: the part of [`RegionFigures::pause_time`] in which that was done.
    pub save_time: Duration,
    /// How long copying back took, of [`RegionFigures::resume_time`].
    pub restore_time: Duration,
    /// As [`RegionFigures::saved`], the last time.
    pub last_saved: Bytes,
    /// As [`RegionFigures::restored`], the last time.
    pub last_restored: Bytes,
    /// As [`RegionFigures::pause_time`], the last time.
    pub last_pause_time: Duration,
    /// As [`RegionFigures::resume_time`], the last time.
    pub last_resume_time: Duration,
    /// As [`RegionFigures::save_time`], the last time; zero where nothing was kept.
    pub last_save_time: Duration,
    /// As [`RegionFigures::restore_time`], the last time; zero where nothing was kept.
    pub last_restore_time: Duration,
}

/// What was copied away or back at once.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Copied {
    pub(crate) bytes: Bytes,
    pub(crate) time: Duration,
}

impl RegionFigures {
    pub(crate) fn count_pause(&mut self, saved: Copied, time: Duration) {
        self.pauses += 1;
        (self.last_saved, self.last_save_time) = (saved.bytes, saved.time);
        self.last_pause_time = time;
        self.saved += saved.bytes;
        self.save_time += saved.time;
        self.pause_time += time;
    }

    pub(crate) fn count_resume(&mut self, restored: Copied, time: Duration) {
        self.resumes += 1;
        (self.last_restored, self.last_restore_time) = (restored.bytes, restored.time);
        self.last_resume_time = time;
        self.restored += restored.bytes;
        self.restore_time += restored.time;
        self.resume_time += time;
    }
}

impl Default for RegionFigures {
    fn default() -> RegionFigures {
        RegionFigures {
            state: RegionState::Mapped,
            mapped: Bytes::ZERO,
            paused: Bytes::ZERO,
            host: Bytes::ZERO,
            disk: Bytes::ZERO,
            pauses: 0,
            resumes: 0,
            saved: Bytes::ZERO,
            restored: Bytes::ZERO,
            pause_time: Duration::ZERO,
            resume_time: Duration::ZERO,
            save_time: Duration::ZERO,
            restore_time: Duration::ZERO,
            last_saved: Bytes::ZERO,
            last_restored: Bytes::ZERO,
            last_pause_time: Duration::ZERO,
            last_resume_time: Duration::ZERO,
            last_save_time: Duration::ZERO,
            last_restore_time: Duration::ZERO,
        }
    }
}
