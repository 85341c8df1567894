//! A reserved range of addresses, with the segments in it and the memory behind them.

use std::collections::BTreeMap;

use lowtide_core::{Bytes, DeviceAddress, DriverError, Stream};

use crate::backing::{Backing, PIECE_MAX};
use crate::backup::MemoryRange;
use crate::device::Device;

/// Segments up to this size share the device's units of memory, as allocations of the driver do.
const SMALL_MAX: Bytes = Bytes::mib(1);

/// A range of addresses reserved with the driver.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) range: MemoryRange,
    /// The unit of physical memory. The range is aligned to it.
    granularity: Bytes,
    /// By address. None overlap. All are within the range, and have memory while the region is mapped.
    segments: BTreeMap<DeviceAddress, RegionSegment>,
    /// Taken out, and empty here, while the region is being paused or resumed.
    pub(crate) backing: Backing,
}

#[derive(Debug)]
struct RegionSegment {
    size: Bytes,
    /// The stream whose work uses the segment.
    stream: Stream,
}

impl Reservation {
    pub(crate) fn new(range: MemoryRange, granularity: Bytes) -> Reservation {
        Reservation {
            range,
            granularity,
            segments: BTreeMap::new(),
            backing: Backing::default(),
        }
    }

    /// Adds a segment in mapped memory that no segment uses. Returns its address, or `None` if it fits nowhere. Linear in
    /// the segments.
    ///
    /// # Errors
    ///
    /// The driver's error, if the wait for earlier uses of the memory fails.
    pub(crate) fn reuse(
        &mut self,
        device: &impl Device,
        size: Bytes,
        stream: Stream,
    ) -> Result<Option<DeviceAddress>, DriverError> {
        let mut runs = self.backing.usable_runs(device).into_iter();
        let Some(place) = runs.find_map(|run| self.first_fit(run, size)) else {
            return Ok(None);
        };
        self.backing.wait(device, place, stream)?;
        Ok(Some(self.insert(place, stream)))
    }

    /// Adds a segment at the lowest address where it fits, and new memory if necessary. Returns its address, or `None` if
    /// it fits nowhere. New memory comes in pieces of at least `piece` bytes if the driver has that much. Linear in the
    /// segments.
    ///
    /// # Errors
    ///
    /// The driver's error. Nothing has changed then.
    pub(crate) fn grow(
        &mut self,
        device: &impl Device,
        size: Bytes,
        stream: Stream,
        piece: Bytes,
    ) -> Result<Option<DeviceAddress>, DriverError> {
        let Some(place) = self.first_fit(self.range, size) else {
            return Ok(None);
        };
        self.backing.wait(device, place, stream)?;
        let needed = self.units_around(place);
        let usable = self.backing.usable(device);
        let mut supplied = Ok(());
        for range in [self.extended(needed, piece), needed] {
            supplied = self.backing.supply(device, &[range]);
            match supplied {
                Ok(()) => break,
                // If the driver refuses this, too, the pieces stay in the table.
                Err(_) => drop(self.backing.release_except(device, &usable)),
            }
            if !matches!(supplied, Err(DriverError::OutOfMemory)) || range == needed {
                break;
            }
        }
        supplied?;
        Ok(Some(self.insert(place, stream)))
    }

    /// Removes a segment. Returns whether it was here. Work of its stream may still use its memory.
    pub(crate) fn remove(&mut self, address: DeviceAddress) -> bool {
        let Some(RegionSegment { size, stream }) = self.segments.remove(&address) else {
            return false;
        };
        self.backing
            .add_stream(MemoryRange { address, size }, stream);
        true
    }

    /// Releases the pieces that no segment uses.
    pub(crate) fn release_unused(&mut self, device: &impl Device) {
        let segments = &self.segments;
        let is_used = |piece: MemoryRange| {
            let last = segments.range(..piece.end()).next_back();
            last.is_some_and(|(&address, segment)| address + segment.size > piece.address)
        };
        self.backing.release_unused(device, is_used);
    }

    /// Returns whether there are no segments and no memory.
    pub(crate) fn is_vacant(&self) -> bool {
        self.segments.is_empty() && self.backing.is_empty()
    }

    /// Returns whether a block lies in a segment.
    pub(crate) fn has(&self, block: MemoryRange) -> bool {
        let last = self.segments.range(..=block.address).next_back();
        last.is_some_and(|(&address, segment)| block.end() <= address + segment.size)
    }

    /// Returns the bytes of the segments.
    pub(crate) fn bytes(&self) -> Bytes {
        self.segments.values().map(|segment| segment.size).sum()
    }

    /// Returns the ranges that must have memory, in address order, one for each new piece. Adjacent segments share a
    /// piece up to [`PIECE_MAX`]. A larger segment has its own.
    pub(crate) fn needed(&self) -> Vec<MemoryRange> {
        self.needed_for(|_| true)
    }

    /// Like [`Reservation::needed`], for the segments whose start `stays` accepts.
    pub(crate) fn needed_for(&self, stays: impl Fn(DeviceAddress) -> bool) -> Vec<MemoryRange> {
        let mut pieces: Vec<MemoryRange> = Vec::new();
        for (&address, segment) in self.segments.iter().filter(|&(&address, _)| stays(address)) {
            let size = segment.size;
            let units = self.units_around(MemoryRange { address, size });
            let covered = pieces.last().map_or(units.address, |piece| piece.end());
            let start = covered.clamp(units.address, units.end());
            let size = units.end().offset_from(start);
            match pieces.last_mut() {
                _ if size.is_zero() => {}
                Some(piece) if piece.end() == start && piece.size + size <= PIECE_MAX => {
                    piece.size += size;
                }
                _ => pieces.push(MemoryRange {
                    address: start,
                    size,
                }),
            }
        }
        pieces
    }

    fn insert(&mut self, place: MemoryRange, stream: Stream) -> DeviceAddress {
        let size = place.size;
        self.segments
            .insert(place.address, RegionSegment { size, stream });
        place.address
    }

    /// Returns the lowest place for a segment within a range.
    fn first_fit(&self, within: MemoryRange, size: Bytes) -> Option<MemoryRange> {
        let unit = if size <= SMALL_MAX {
            Bytes(512)
        } else {
            self.granularity
        };
        let size = size.round_up(unit);
        let mut start = within.address;
        let before = self.segments.range(..start).next_back();
        let inside = self.segments.range(start..within.end());
        for (&address, segment) in before.into_iter().chain(inside) {
            if start + size <= address {
                break;
            }
            start = start.max(rounded_up(address + segment.size, unit));
        }
        let place = MemoryRange {
            address: start,
            size,
        };
        (place.end() <= within.end()).then_some(place)
    }

    /// Returns the range of whole units of memory that contains a place.
    fn units_around(&self, place: MemoryRange) -> MemoryRange {
        let start = place.address.offset_from(self.range.address);
        let start = start.round_down(self.granularity);
        let end = place.end().offset_from(self.range.address);
        MemoryRange {
            address: self.range.address + start,
            size: end.round_up(self.granularity) - start,
        }
    }

    /// Returns a range extended so that its last new piece has `piece` bytes or ends at the next existing piece.
    fn extended(&self, range: MemoryRange, piece: Bytes) -> MemoryRange {
        let rest = MemoryRange {
            address: range.address,
            size: self.range.end().offset_from(range.address),
        };
        let Some(last) = self.backing.holes(range).pop() else {
            return range;
        };
        let piece = piece.round_up(self.granularity).min(PIECE_MAX);
        if last.end() < range.end() || last.size >= piece {
            return range;
        }
        let mut holes = self.backing.holes(rest).into_iter();
        let whole = holes.find(|hole| hole.address == last.address);
        let size = whole.map_or(last.size, |hole| hole.size).min(piece);
        let size = (last.address + size).offset_from(range.address);
        MemoryRange { size, ..range }
    }
}

fn rounded_up(address: DeviceAddress, unit: Bytes) -> DeviceAddress {
    DeviceAddress(Bytes(address.get()).round_up(unit).get())
}
