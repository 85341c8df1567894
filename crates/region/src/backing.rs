//! The physical memory behind a range of addresses: pieces, each a handle that is mapped completely.

use std::collections::{BTreeMap, BTreeSet};

use lowtide_core::{Bytes, DeviceAddress, DriverError, Handle, Physical, Stream};

use crate::backup::MemoryRange;
use crate::device::Device;

/// The largest piece that segments share. Any segment in a piece keeps all of the piece. A larger segment has its own
/// piece: mapping and unmapping one large piece is faster than many.
pub(crate) const PIECE_MAX: Bytes = Bytes::gib(1);

/// Every address.
const EVERYTHING: MemoryRange = MemoryRange {
    address: DeviceAddress::NULL,
    size: Bytes(u64::MAX),
};

#[derive(Debug)]
struct Piece {
    size: Bytes,
    handle: Handle,
    /// The streams of removed segments. Their work may still use the piece.
    streams: Vec<Stream>,
}

/// The pieces of one reserved range. None overlap; all are within the range.
///
/// What a failed call completed is recorded here and in [`Physical`], so that it can be undone or continued. A piece that
/// is not mapped keeps its contents.
#[derive(Debug, Default)]
pub(crate) struct Backing {
    pieces: BTreeMap<DeviceAddress, Piece>,
}

impl Backing {
    /// Returns whether there are no pieces.
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Returns the bytes of all pieces, mapped or not.
    pub(crate) fn bytes(&self) -> Bytes {
        self.pieces.values().map(|piece| piece.size).sum()
    }

    /// Returns the start of every piece, mapped or not.
    pub(crate) fn starts(&self) -> BTreeSet<DeviceAddress> {
        self.pieces.keys().copied().collect()
    }

    /// Returns the starts of the usable pieces.
    pub(crate) fn usable(&self, device: &impl Device) -> BTreeSet<DeviceAddress> {
        device.with_physical(|physical| {
            let usable = self.pieces.keys();
            let usable = usable.filter(|&&address| has_access(physical, address));
            usable.copied().collect()
        })
    }

    /// Returns the usable ranges in address order. Adjacent pieces are one range.
    pub(crate) fn usable_runs(&self, device: &impl Device) -> Vec<MemoryRange> {
        device.with_physical(|physical| {
            self.runs(EVERYTHING, |address| has_access(physical, address))
        })
    }

    /// Makes some ranges usable, with one new piece for each hole in a range. The ranges are in address order, and none
    /// overlap. Linear in the pieces of the ranges.
    pub(crate) fn supply(
        &mut self,
        device: &impl Device,
        ranges: &[MemoryRange],
    ) -> Result<(), DriverError> {
        for &range in ranges {
            for hole in self.holes(range) {
                self.create(device, hole)?;
            }
        }
        let is_adjacent = |one: &MemoryRange, next: &MemoryRange| one.end() == next.address;
        let mut runs = ranges.chunk_by(is_adjacent);
        runs.try_for_each(|run| {
            let (first, last) = (run[0].address, run[run.len() - 1].end());
            let size = last.offset_from(first);
            self.make_usable(
                device,
                MemoryRange {
                    address: first,
                    size,
                },
            )
        })
    }

    /// Makes the pieces that overlap a range usable. Linear in those pieces.
    fn make_usable(&mut self, device: &impl Device, range: MemoryRange) -> Result<(), DriverError> {
        for (&address, piece) in self.touched(range) {
            device.with_physical(|physical| match physical.view(address) {
                Some(_) => Ok(()),
                None => physical.map(address, piece.handle),
            })?;
        }
        let mapped = device
            .with_physical(|physical| self.runs(range, |address| !has_access(physical, address)));
        mapped.iter().try_for_each(|run| {
            device.with_physical(|physical| physical.set_access(run.address, run.size))
        })?;
        debug_assert!(
            self.touched(range).all(|piece| is_shown(device, piece)),
            "each usable piece is mapped at its own address"
        );
        Ok(())
    }

    /// Unmaps every piece. Makes one call for each run of adjacent pieces.
    pub(crate) fn unmap_all(&mut self, device: &impl Device) -> Result<(), DriverError> {
        let mapped = device.with_physical(|physical| {
            self.runs(EVERYTHING, |address| physical.view(address).is_some())
        });
        mapped.iter().try_for_each(|run| {
            device.with_physical(|physical| physical.unmap(run.address, run.size))
        })?;
        debug_assert!(
            device.with_physical(|physical| {
                let mut starts = self.pieces.keys();
                starts.all(|&address| physical.view(address).is_none())
            }),
            "no piece stays mapped after all were unmapped"
        );
        Ok(())
    }

    /// Releases every piece except those that start at `kept`. If a call fails, the others are still made.
    ///
    /// # Errors
    ///
    /// The driver's first error. The pieces that it refused stay.
    pub(crate) fn release_except(
        &mut self,
        device: &impl Device,
        kept: &BTreeSet<DeviceAddress>,
    ) -> Result<(), DriverError> {
        let mut outcome = Ok(());
        let leaves = |address| !kept.contains(&address);
        let mapped = device.with_physical(|physical| {
            let is_mapped = |address| leaves(address) && physical.view(address).is_some();
            self.runs(EVERYTHING, is_mapped)
        });
        for run in mapped {
            let unmapped = device.with_physical(|physical| physical.unmap(run.address, run.size));
            outcome = outcome.and(unmapped);
        }
        self.pieces.retain(|&address, piece| {
            if !leaves(address) {
                return true;
            }
            let released = device.with_physical(|physical| match physical.view(address) {
                Some(_) => None,
                None => Some(physical.release(piece.handle)),
            });
            let is_released = matches!(released, Some(Ok(())));
            outcome = std::mem::replace(&mut outcome, Ok(())).and(released.unwrap_or(Ok(())));
            !is_released
        });
        outcome
    }

    /// Releases the pieces that end at or below `end`, except those that the driver refuses.
    pub(crate) fn release_until(&mut self, device: &impl Device, end: DeviceAddress) {
        let pieces = self.pieces.iter();
        let kept = pieces.filter(|(address, piece)| **address + piece.size > end);
        let kept = kept.map(|(&address, _)| address).collect();
        let _ = self.release_except(device, &kept);
    }

    /// Releases the pieces in which nothing is in use, after waiting for the work that may use them. Pieces that the
    /// driver refuses stay, and are released by a later call.
    pub(crate) fn release_unused(
        &mut self,
        device: &impl Device,
        is_used: impl Fn(MemoryRange) -> bool,
    ) {
        let is_used = |address: DeviceAddress, piece: &Piece| {
            is_used(MemoryRange {
                address,
                size: piece.size,
            })
        };
        let mut pieces = self.pieces.iter();
        let has_work = |piece: &Piece| !piece.streams.is_empty();
        if pieces.any(|(&address, piece)| has_work(piece) && !is_used(address, piece)) {
            // Otherwise the pieces stay.
            let _ = self.synchronize(device);
        }
        let pieces = self.pieces.iter();
        let kept = pieces.filter(|&(&address, piece)| has_work(piece) || is_used(address, piece));
        let kept = kept.map(|(&address, _)| address).collect();
        let _ = self.release_except(device, &kept);
    }

    /// Records that work in `stream` may still use a range of a removed segment.
    pub(crate) fn add_stream(&mut self, range: MemoryRange, stream: Stream) {
        for (_, piece) in self.touched(range) {
            if !piece.streams.contains(&stream) {
                piece.streams.push(stream);
            }
        }
    }

    /// Waits for work that may still use a range, except for work in `stream`: the next use of the range is ordered after
    /// that.
    pub(crate) fn wait(
        &mut self,
        device: &impl Device,
        range: MemoryRange,
        stream: Stream,
    ) -> Result<(), DriverError> {
        let is_own = |&used: &Stream| used == stream;
        let is_ordered = { self.touched(range) }.all(|(_, piece)| piece.streams.iter().all(is_own));
        if is_ordered {
            return Ok(());
        }
        self.synchronize(device)
    }

    /// Waits for all work of the device, once for all pieces: the program may have destroyed their streams, of which the
    /// driver then must not be asked.
    fn synchronize(&mut self, device: &impl Device) -> Result<(), DriverError> {
        device.synchronize()?;
        self.forget_streams();
        Ok(())
    }

    /// Records that no work uses any piece.
    pub(crate) fn forget_streams(&mut self) {
        for piece in self.pieces.values_mut() {
            piece.streams.clear();
        }
    }

    /// Returns the parts of a range that have no piece, in address order.
    pub(crate) fn holes(&self, range: MemoryRange) -> Vec<MemoryRange> {
        let mut holes = Vec::new();
        let mut start = range.address;
        let before = self.pieces.range(..range.address).next_back();
        let within = self.pieces.range(range.address..range.end());
        for (&address, piece) in before.into_iter().chain(within) {
            if address > start {
                let size = address.offset_from(start);
                holes.push(MemoryRange {
                    address: start,
                    size,
                });
            }
            start = start.max(address + piece.size);
        }
        if start < range.end() {
            let size = range.end().offset_from(start);
            holes.push(MemoryRange {
                address: start,
                size,
            });
        }
        holes
    }

    /// Returns the bytes of some ranges that have no piece.
    pub(crate) fn missing(&self, ranges: &[MemoryRange]) -> Bytes {
        let holes = ranges.iter().flat_map(|&range| self.holes(range));
        holes.map(|hole| hole.size).sum()
    }

    /// Creates the piece that fills a hole.
    fn create(&mut self, device: &impl Device, hole: MemoryRange) -> Result<(), DriverError> {
        let size = hole.size;
        let piece = Piece {
            size,
            handle: device.with_physical(|physical| physical.create(size))?,
            streams: Vec::new(),
        };
        let replaced = self.pieces.insert(hole.address, piece);
        debug_assert!(replaced.is_none(), "a hole has no piece");
        Ok(())
    }

    /// Returns the pieces that overlap a range, in address order.
    fn touched(
        &mut self,
        range: MemoryRange,
    ) -> impl Iterator<Item = (&DeviceAddress, &mut Piece)> {
        let first = self.first_touched(range);
        self.pieces.range_mut(first..range.end())
    }

    /// Returns the start of the first piece that overlaps a range. At most one such piece starts before the range.
    fn first_touched(&self, range: MemoryRange) -> DeviceAddress {
        let before = self.pieces.range(..range.address).next_back();
        let before = before.filter(|(address, piece)| **address + piece.size > range.address);
        before.map_or(range.address, |(&address, _)| address)
    }

    /// Returns the ranges of adjacent chosen pieces among those that overlap a range.
    fn runs(
        &self,
        range: MemoryRange,
        is_chosen: impl Fn(DeviceAddress) -> bool,
    ) -> Vec<MemoryRange> {
        let mut runs: Vec<MemoryRange> = Vec::new();
        let touched = self.first_touched(range)..range.end();
        for (&address, piece) in self.pieces.range(touched) {
            if !is_chosen(address) {
                continue;
            }
            match runs.last_mut().filter(|run| run.end() == address) {
                Some(run) => run.size += piece.size,
                None => runs.push(MemoryRange {
                    address,
                    size: piece.size,
                }),
            }
        }
        runs
    }
}

/// Returns whether a piece's whole handle is mapped at its address, for the device to read and write.
fn is_shown(device: &impl Device, (&address, piece): (&DeviceAddress, &mut Piece)) -> bool {
    device.with_physical(|physical| {
        let view = physical.view(address);
        view.is_some_and(|view| {
            (view.handle, view.size, view.has_access) == (piece.handle, piece.size, true)
        })
    })
}

/// Returns whether the device may read and write the handle that is mapped from an address on.
fn has_access<D>(physical: &Physical<D>, address: DeviceAddress) -> bool {
    physical.view(address).is_some_and(|view| view.has_access)
}
