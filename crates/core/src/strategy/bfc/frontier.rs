//! The safe frontier: what was freed after it is known to be in use by work that is still queued.
//!
//! Frees and marks share one count. A chunk carries the count of its free until the frontier passes
//! it: until then it is handed out as it is, to requests that do not mind, and merged with no other.
//! What a request leaves of such a chunk carries its count on (in TensorFlow such a rest is never
//! merged again, because only the chunk that was freed is queued).

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::{Bfc, Merge, SplitChange};
use crate::block::BlockState;
use crate::segment::Heap;
use crate::strategy::Request;
use crate::units::DeviceAddress;

impl Bfc {
    /// Returns a count above those of all frees so far and below those of all later ones.
    pub(crate) fn mark_frees(&mut self) -> u64 {
        let timing = self.timing.get_or_insert_default();
        timing.count += 1;
        timing.count
    }

    /// Merges what was freed before `mark` with its neighbours.
    pub(crate) fn set_safe_frontier(&mut self, heap: &mut Heap, mark: u64) {
        let timing = self.timing.get_or_insert_default();
        timing.frontier = timing.frontier.max(mark);
        let first_unsafe = (timing.frontier, DeviceAddress::NULL);
        for index in 0..self.domains.len() {
            let recent = &mut self.domains[index].recent;
            let unsafe_chunks = recent.split_off(&first_unsafe);
            let safe = std::mem::replace(recent, unsafe_chunks);
            self.merge_safe(heap, &safe);
        }
    }

    /// Merges chunks that were just taken out of the recent ones.
    fn merge_safe(&mut self, heap: &mut Heap, safe: &BTreeSet<(u64, DeviceAddress)>) {
        let mut addresses: Vec<DeviceAddress> = safe.iter().map(|&(_, address)| address).collect();
        // From the highest down: each has met the chunk behind it before the one in front swallows it.
        addresses.sort_unstable_by_key(|&address| Reverse(address));
        let id_at = |heap: &Heap, address| {
            let id = heap.blocks.find(address);
            id.expect("a chunk is swallowed only in or after its own turn")
        };
        for &address in &addresses {
            let id = id_at(heap, address);
            heap.blocks.set_mark(id, 0);
        }
        let mut change = SplitChange::default();
        for &address in &addresses {
            let id = id_at(heap, address);
            self.remove_free(heap, id, &mut change);
            let (id, _) = self.coalesce(heap, id, Merge::Safe, &mut change);
            self.insert_free(heap, id, &mut change);
        }
        change.apply(&mut heap.stats);
    }

    /// Merges chunks that the frontier has not passed with their free neighbours, first freed first,
    /// until one is large enough for a request. Returns whether one is.
    pub(super) fn merge_recent(&mut self, heap: &mut Heap, request: &Request) -> bool {
        let recent = self.chunks_of(request.domain).recent.clone();
        let mut change = SplitChange::default();
        let mut found = false;
        for (_, address) in recent {
            let Some(id) = heap.blocks.find(address) else {
                continue;
            };
            debug_assert_eq!(heap.blocks.state(id), BlockState::Free);
            self.remove_free(heap, id, &mut change);
            let (id, _) = self.coalesce(heap, id, Merge::All, &mut change);
            self.insert_free(heap, id, &mut change);
            found = heap.blocks.get(id).size >= request.size;
            if found {
                break;
            }
        }
        change.apply(&mut heap.stats);
        found
    }
}
