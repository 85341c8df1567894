//! The safe frontier: what was freed after it is known to be in use by work that is still queued.
//!
//! A chunk carries the count of its free until the frontier passes it. Until then it is handed out as it is, and merged
//! with no other. The device is taken to be `safe_frontier_lag` frees behind the program.
//! What a request leaves of such a chunk carries its count on (in TensorFlow such a rest is never
//! merged again, because only the chunk that was freed is queued).

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::timing::Timing;
use super::{Bfc, Merge};
use crate::block::BlockState;
use crate::segment::Heap;
use crate::strategy::Request;
use crate::units::DeviceAddress;

impl Bfc {
    /// Merges what the frontier has passed with its neighbours. Linear in the domains, and O(log n) for each chunk that it
    /// passes.
    pub(super) fn merge_passed(&mut self, heap: &mut Heap) {
        let frontier = self.timing.as_ref().map_or(0, Timing::frontier);
        let first_unsafe = (frontier + 1, DeviceAddress::NULL);
        for index in 0..self.domains.len() {
            let recent = &mut self.domains[index].recent;
            if recent.first().is_none_or(|first| *first >= first_unsafe) {
                continue;
            }
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
        for &address in &addresses {
            let id = id_at(heap, address);
            self.remove_free(heap, id);
            let whole = self.coalesce(heap, id, Merge::Safe);
            self.insert_free(heap, whole);
        }
    }

    /// Merges chunks that the frontier has not passed with their free neighbours, first freed first,
    /// until one is large enough for a request. Returns whether one is.
    pub(super) fn merge_recent(&mut self, heap: &mut Heap, request: &Request) -> bool {
        let recent = self.chunks_of(request.domain).recent.clone();
        for (_, address) in recent {
            let Some(id) = heap.blocks.find(address) else {
                continue;
            };
            debug_assert_eq!(heap.blocks.state(id), BlockState::Free);
            self.remove_free(heap, id);
            let whole = self.coalesce(heap, id, Merge::All);
            self.insert_free(heap, whole);
            if heap.blocks.get(whole).size >= request.size {
                return true;
            }
        }
        false
    }
}
