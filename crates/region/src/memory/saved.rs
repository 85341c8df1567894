//! [`Saved`]: the saved contents of a region, complete or in part.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use lowtide_core::DeviceAddress;

use crate::backup::{BackupError, BackupKind, Backups, MemoryRange};
use crate::figures::Copied;

/// The saved contents of a region.
#[derive(Debug)]
pub(super) struct Saved<K> {
    pub(super) backup: K,
    /// The ranges to save, in address order.
    ranges: Vec<MemoryRange>,
    /// How many of the ranges are saved.
    count: usize,
    /// How long saving took.
    time: Duration,
    /// Whether the program was given the address of the copy, and may read it.
    pub(super) may_be_read: bool,
    /// Whether the copy is useless. It is released by the next thread that locks the backups.
    pub(super) has_ended: bool,
}

impl<K> Saved<K> {
    /// Begins a backup of some ranges, which are in address order. None is saved yet.
    pub(super) fn begin<B: Backups<Backup = K>>(
        ranges: Vec<MemoryRange>,
        kind: BackupKind,
        backups: &mut B,
    ) -> Result<Saved<K>, BackupError> {
        let start = Instant::now();
        let backup = caught(|| backups.begin(&ranges, kind))?;
        Ok(Saved {
            backup,
            ranges,
            count: 0,
            time: start.elapsed(),
            may_be_read: false,
            has_ended: false,
        })
    }

    /// Saves the next ranges. Returns the address below which all is saved, or `None` if everything is.
    pub(super) fn save_next<B: Backups<Backup = K>>(
        &mut self,
        backups: &mut B,
    ) -> Result<Option<DeviceAddress>, BackupError> {
        let start = Instant::now();
        self.count = caught(|| backups.save_next(&mut self.backup))?;
        self.time += start.elapsed();
        Ok(self.ranges.get(self.count).map(|range| range.address))
    }

    /// Returns the ranges that are saved, in address order.
    pub(super) fn ranges(&self) -> &[MemoryRange] {
        &self.ranges[..self.count]
    }

    /// Returns whether some of the ranges are not saved.
    pub(super) fn is_partial(&self) -> bool {
        self.count < self.ranges.len()
    }

    /// Restores those blocks that are saved.
    pub(super) fn restore<B: Backups<Backup = K>>(
        &mut self,
        blocks: &[MemoryRange],
        backups: &mut B,
    ) -> Result<Copied, BackupError> {
        let blocks = blocks.iter();
        let ranges: Vec<_> = blocks.filter_map(|&block| self.around(block)).collect();
        let start = Instant::now();
        caught(|| backups.restore(&mut self.backup, &ranges))?;
        Ok(Copied {
            bytes: ranges.iter().map(|range| range.size).sum(),
            time: start.elapsed(),
        })
    }

    /// Returns the size and time of the save.
    pub(super) fn copied(&self) -> Copied {
        Copied {
            bytes: self.ranges().iter().map(|range| range.size).sum(),
            time: self.time,
        }
    }

    /// Returns the block if it lies in a saved range.
    pub(super) fn around(&self, block: MemoryRange) -> Option<MemoryRange> {
        let saved = self.ranges();
        let after = saved.partition_point(|range| range.address <= block.address);
        let range = saved.get(after.checked_sub(1)?)?;
        range.contains(block).then_some(block)
    }

    /// Returns the block if it is a saved range: it has the same start and the same size.
    pub(super) fn exactly(&self, block: MemoryRange) -> Option<MemoryRange> {
        let find = |range: &MemoryRange| range.address.cmp(&block.address);
        let range = self.ranges()[self.ranges().binary_search_by(find).ok()?];
        (range.size == block.size).then_some(range)
    }
}

/// Returns the result of `copy`, or an error if it panics. Otherwise a panic would leave the region in the state pausing
/// or resuming for ever.
fn caught<T>(copy: impl FnOnce() -> Result<T, BackupError>) -> Result<T, BackupError> {
    // `Backups` guarantees that its state after a panic is that after an error.
    catch_unwind(AssertUnwindSafe(copy)).unwrap_or_else(|panic| {
        let owned = panic.downcast_ref::<String>().cloned();
        let text = || panic.downcast_ref::<&str>().map(ToString::to_string);
        let message = owned.or_else(text).unwrap_or_default();
        Err(BackupError::Panicked { message })
    })
}
