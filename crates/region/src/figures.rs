//! The figures of a region.

use std::time::Duration;

use lowtide_core::Bytes;

use crate::state::RegionState;

/// The figures of one region on one device. Totals count from the region's first use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionFigures {
    /// The region's state.
    pub state: RegionState,
    /// Physical memory on the device, mapped or not. While a pause or resume is in progress, the value from before it.
    pub mapped: Bytes,
    /// The size of the segments, if the region is paused; zero otherwise. This includes segments without allocated
    /// blocks, which a resume releases:
    /// [`RegionMemory::needed_to_resume`](crate::RegionMemory::needed_to_resume) does not count them.
    pub paused: Bytes,
    /// The size of the copy in host memory.
    pub host: Bytes,
    /// The size of the copy on disk.
    pub disk: Bytes,
    /// The number of pauses.
    pub pauses: u64,
    /// The number of resumes.
    pub resumes: u64,
    /// The bytes saved by pauses.
    pub saved: Bytes,
    /// The bytes restored by resumes.
    pub restored: Bytes,
    /// The time of the pauses, including the wait for the device.
    pub pause_time: Duration,
    /// The time of the resumes.
    pub resume_time: Duration,
    /// The time of saving, which is part of [`RegionFigures::pause_time`].
    pub save_time: Duration,
    /// The time of restoring, which is part of [`RegionFigures::resume_time`].
    pub restore_time: Duration,
    /// The bytes saved by the last pause.
    pub last_saved: Bytes,
    /// The bytes restored by the last resume.
    pub last_restored: Bytes,
    /// The time of the last pause.
    pub last_pause_time: Duration,
    /// The time of the last resume.
    pub last_resume_time: Duration,
    /// The time of saving in the last pause; zero if nothing was saved.
    pub last_save_time: Duration,
    /// The time of restoring in the last resume; zero if nothing was saved.
    pub last_restore_time: Duration,
}

/// The size and time of one save or restore.
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
