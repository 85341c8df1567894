//! Evidence from expandable segments: each is one address range, and a pool has one for each stream and size class.

use std::collections::BTreeMap;

use lowtide_core::{Bytes, DeviceAddress};

use super::{InferredSegment, Layout, Owner, SEGMENT_HOLE_MAX};

impl Layout {
    /// Records that the expandable segments before the first event are in different pools, unless they may be one
    /// segment: a pool has one for each stream and kind.
    pub(super) fn separate_adopted(&mut self) {
        let expandable = self.segments.iter().enumerate();
        let expandable = expandable.filter(|(_, segment)| segment.is_expandable);
        let mut of_owner: BTreeMap<Owner, Vec<usize>> = BTreeMap::new();
        for (index, segment) in expandable {
            of_owner.entry(segment.owner).or_default().push(index);
        }
        for runs in of_owner.values_mut() {
            runs.sort_by_key(|&run| self.segments[run].start);
            let several = runs.chunk_by(|&one, &next| self.may_be_one(one, next));
            let several: Vec<&[usize]> = several.collect();
            let mut below = Vec::new();
            for runs in several {
                // Each run is in another segment than all runs below it. These are as many pairs as there can be,
                // so the evidence may exceed what is kept.
                if !self.apart.is_too_much() {
                    self.apart.separate_all(runs.iter().copied(), below.clone());
                }
                below.extend(runs);
            }
        }
    }

    /// Returns whether two runs of pages may be of one segment, which is one address range. The second is the next
    /// run of the same owner.
    fn may_be_one(&self, one: usize, next: usize) -> bool {
        let InferredSegment { owner, end, .. } = self.segments[one];
        let start = self.segments[next].start;
        let mut at = end;
        while let Some((&address, block)) = self.blocks.range(at..start.max(at)).next() {
            if self.is_of_another(block.segment, owner) {
                return false;
            }
            at = self.segments[block.segment].end.max(address + block.size);
        }
        start <= end + SEGMENT_HOLE_MAX
    }

    /// Returns whether a segment is known not to be a run of the owner's pages.
    fn is_of_another(&self, index: usize, owner: Owner) -> bool {
        let segment = &self.segments[index];
        let is_of_kind = segment.is_expandable && segment.owner == owner;
        segment.owner.stream != owner.stream || segment.is_kind_known && !is_of_kind
    }

    /// Records that the new expandable segment `new` is in a different pool from the other segments of its owner.
    /// `request` is the size of the request that it began for, if known. Exceptions are segments without room for
    /// the request, and segments that may have been mapped behind `new` before the first event.
    pub(super) fn separate_begun(&mut self, new: usize, request: Option<Bytes>) {
        let InferredSegment {
            owner, start, end, ..
        } = self.segments[new];
        let of_stream =
            (owner.stream, DeviceAddress::NULL)..=(owner.stream, DeviceAddress(u64::MAX));
        let (mut may_be_one, mut others) = (true, Vec::new());
        if self.empty.remove(&owner) {
            return;
        }
        for (&(_, at), &other) in self.expandable.range(of_stream) {
            let is_above = start < at;
            if is_above {
                let is_near = other < self.adopted && at <= end + SEGMENT_HOLE_MAX;
                may_be_one &= is_near && !self.is_of_another(other, owner);
            }
            let is_of_owner = self.segments[other].owner == owner;
            if other != new && is_of_owner && !(is_above && may_be_one) {
                others.push(other);
            }
        }
        for other in others {
            if self.has_room(other, request) {
                self.apart.separate(other, new);
            }
        }
    }

    /// Returns whether a request would have had room in any expandable segment of its owner.
    pub(super) fn any_has_room(&mut self, owner: Owner, size: Bytes) -> bool {
        let is_of_owner = |at: &usize| self.segments[*at].owner == owner;
        let of_owner = self.expandable.values().copied().filter(is_of_owner);
        let of_owner: Vec<usize> = of_owner.collect();
        { of_owner.into_iter() }.any(|segment| self.has_room(segment, Some(size)))
    }

    /// Returns whether a request would have had room in an expandable segment. Returns true if the recording does
    /// not show the size of the segment's range. A segment that began before the first event may have less room.
    fn has_room(&mut self, segment: usize, request: Option<Bytes>) -> bool {
        let (Some(room), Some(size)) = (self.room, request) else {
            return true;
        };
        let start = self.segments[segment].start;
        let (mut at, end) = (start, start + room);
        for (&address, block) in self.blocks.range(start..end) {
            self.looked_at += 1;
            if block.is_free {
                continue;
            }
            if address >= at + size {
                return true;
            }
            at = address + block.size;
        }
        at + size <= end
    }

    /// Records that a segment that has grown for a request is in a different pool from the segments below it with
    /// room for the request. A pool grows at the lowest addresses where a request fits. A segment is one range, so
    /// a segment below such room, or below memory of another kind, is a different one.
    pub(super) fn separate_below(&mut self, grown: usize, size: Bytes) {
        let InferredSegment { owner, start, .. } = self.segments[grown];
        let below = (owner.stream, DeviceAddress::NULL)..(owner.stream, start);
        let (mut above, mut may_be_one) = (start, true);
        let mut others = Vec::new();
        for (_, &other) in self.expandable.range(below).rev() {
            self.looked_at += 1;
            let segment = &self.segments[other];
            may_be_one &= !self.is_of_another(other, owner) && above < segment.end + size;
            above = segment.start;
            let is_of_owner = segment.owner == owner;
            if is_of_owner && !may_be_one && self.are_of_one_pool(other, grown).is_none() {
                others.push(other);
            }
        }
        self.apart.separate_all([grown], others);
    }
}
