//! Which physical bytes each address shows.

use std::collections::BTreeMap;

use lowtide_core::{Bytes, DeviceAddress, Handle};

/// Bytes of a handle, or of plain memory, whose offsets are its addresses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Piece {
    pub(super) handle: Option<Handle>,
    pub(super) start: u64,
    pub(super) end: u64,
}

impl Piece {
    pub(super) fn overlaps(&self, other: &Piece) -> bool {
        self.handle == other.handle && self.start < other.end && other.start < self.end
    }
}

/// The handles that are mapped, by address. They do not overlap.
#[derive(Debug, Default)]
pub(super) struct Places {
    mapped: BTreeMap<DeviceAddress, (Bytes, Handle)>,
}

impl Places {
    pub(super) fn map(&mut self, address: DeviceAddress, size: Bytes, handle: Handle) {
        self.mapped.insert(address, (size, handle));
    }

    pub(super) fn unmap(&mut self, address: DeviceAddress, size: Bytes) {
        let end = address + size;
        self.mapped
            .retain(|&start, _| start < address || start >= end);
    }

    /// Returns the physical bytes of a range. Where no handle is mapped, the memory is plain.
    pub(super) fn pieces(&self, address: DeviceAddress, size: Bytes) -> Vec<Piece> {
        let end = address + size;
        let mut pieces = Vec::new();
        let mut at = address;
        while at < end {
            let below = self.mapped.range(..=at).next_back();
            let below = below.filter(|&(&start, &(size, _))| start + size > at);
            let next = self.mapped.range(at..end).next();
            let (handle, base, last) = match (below, next) {
                (Some((&start, &(size, handle))), _) => (Some(handle), start, start + size),
                (None, Some((&start, _))) => (None, DeviceAddress(0), start),
                (None, None) => (None, DeviceAddress(0), end),
            };
            let last = last.min(end);
            pieces.push(Piece {
                handle,
                start: at.offset_from(base).get(),
                end: last.offset_from(base).get(),
            });
            at = last;
        }
        pieces
    }
}
