//! Contents of a region that are kept, and those of which that is so.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use lowtide_core::DeviceAddress;

use crate::backup::{BackupError, BackupKind, Backups, MemoryRange};
use crate::figures::Copied;

/// Contents that are kept.
#[derive(Debug)]
pub(super) struct Saved<K> {
    pub(super) backup: K,
    /// What was to be saved, by rising addresses.
    ranges: Vec<MemoryRange>,
    /// How many of the ranges are saved.
    count: usize,
    /// How long saving took.
    time: Duration,
    /// Whether someone was given the address of the copy, and may read it.
    pub(super) is_shown: bool,
    /// Whether it is of no use any more, and waits for someone who has the backups.
    pub(super) is_over: bool,
}

impl<K> Saved<K> {
    /// Begins to save some ranges, by rising addresses: none is saved yet.
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
            is_shown: false,
            is_over: false,
        })
    }

    /// Saves the next ranges. Returns below which address all is saved, or `None` once everything is.
    pub(super) fn go_on<B: Backups<Backup = K>>(
        &mut self,
        backups: &mut B,
    ) -> Result<Option<DeviceAddress>, BackupError> {
        let start = Instant::now();
        self.count = caught(|| backups.save_next(&mut self.backup))?;
        self.time += start.elapsed();
        Ok(self.ranges.get(self.count).map(|range| range.address))
    }

    /// Returns what is saved, by rising addresses.
    pub(super) fn ranges(&self) -> &[MemoryRange] {
        &self.ranges[..self.count]
    }

    /// Returns whether some of what was to be saved is not.
    pub(super) fn is_partial(&self) -> bool {
        self.count < self.ranges.len()
    }

    /// Copies back some blocks, as far as they are saved.
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

    /// Returns how much was saved, and how long that took.
    pub(super) fn copied(&self) -> Copied {
        Copied {
            bytes: self.ranges().iter().map(|range| range.size).sum(),
            time: self.time,
        }
    }

    /// Returns the block, if it lies in a range that is saved.
    pub(super) fn around(&self, block: MemoryRange) -> Option<MemoryRange> {
        let saved = self.ranges();
        let after = saved.partition_point(|range| range.address <= block.address);
        let range = saved.get(after.checked_sub(1)?)?;
        range.contains(block).then_some(block)
    }

    /// Returns the block, if it is one that was saved: it begins where that did, and is as long but for what
    /// rounding added.
    pub(super) fn exactly(&self, block: MemoryRange) -> Option<MemoryRange> {
        let find = |range: &MemoryRange| range.address.cmp(&block.address);
        let range = self.ranges()[self.ranges().binary_search_by(find).ok()?];
        (range.size == block.size).then_some(range)
    }
}

/// Returns what a copy says, and an error where it panics: the region is then as before it, where it would have
/// stayed on its way for good.
fn caught<T>(copy: impl FnOnce() -> Result<T, BackupError>) -> Result<T, BackupError> {
    // What a panic leaves half done is behind `Backups`, which is to be as after an error.
    catch_unwind(AssertUnwindSafe(copy)).unwrap_or_else(|panic| {
        let owned = panic.downcast_ref::<String>().cloned();
        let text = || panic.downcast_ref::<&str>().map(ToString::to_string);
        let message = owned.or_else(text).unwrap_or_default();
        Err(BackupError::Panicked { message })
    })
}
