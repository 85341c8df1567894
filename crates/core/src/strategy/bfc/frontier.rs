//! The safe frontier: queued work may still use chunks that were freed after it.
//!
//! A chunk's mark is the count of its free until the frontier passes that count. Until then the chunk can be
//! allocated, but is not merged. The device is assumed to be `safe_frontier_lag` frees behind the program. If
//! such a chunk is split, the rest keeps its mark. (In TensorFlow such a rest is never merged again, because only
//! the freed chunk is queued.)

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::timing::Timing;
use super::{Bfc, Merge};
use crate::block::BlockState;
use crate::segment::Heap;
use crate::strategy::Request;
use crate::units::DeviceAddress;

impl Bfc {
    /// Merges the chunks that the frontier has passed with their neighbours. Linear in the domains, and O(log n)
    /// for each of these chunks.
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

    /// Merges chunks that were just removed from `recent`.
    fn merge_safe(&mut self, heap: &mut Heap, safe: &BTreeSet<(u64, DeviceAddress)>) {
        let mut addresses: Vec<DeviceAddress> = safe.iter().map(|&(_, address)| address).collect();
        // From the highest address down: each chunk is merged with the one behind it before the one in front
        // absorbs it.
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

    /// Merges chunks that the frontier has not passed with their free neighbours until one is large enough for a
    /// request. The chunk that was freed first comes first. Returns whether one is large enough.
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
