//! Recently freed blocks, which the next request of their size takes as they are.
//!
//! Merging a block with its neighbours, only to split it again, is most of the cost of a small request. So merging is
//! delayed, as in the lazy buddy systems of Barkley and Lee (1989): until a request of the domain is over 1 MiB, or any
//! request finds nothing else. Then all free neighbours are merged. So a job with requests over 1 MiB gets the same
//! addresses in each step. Without such requests, two of three random programs that repeat never did.

use crate::block::BlockId;
use crate::domain::DomainId;
use crate::strategy::free_blocks::FreeBlock;
use crate::units::Bytes;

/// Requests are rounded up to this, as PyTorch rounds them.
pub(super) const UNIT: Bytes = Bytes(512);

/// Freed blocks up to this size are not merged at once. Each step of a job that uses much memory makes a request over it.
/// Eleven recorded jobs reserve the same as without, and random requests up to 6 % more, or less.
pub(super) const RECENT_MAX: Bytes = Bytes::mib(1);

/// So many blocks of a size are not merged. With 100,000 live blocks, a request and its free take a tenth longer with half
/// of it.
const BLOCKS_MAX: usize = 32;

/// The recently freed blocks.
#[derive(Debug, Default)]
pub(super) struct Recent {
    domains: Vec<OfDomain>,
}

/// A domain's blocks.
#[derive(Debug, Default)]
struct OfDomain {
    /// In units of [`UNIT`].
    sizes: Vec<OfSize>,
    /// The index of each size with blocks, and of some without.
    filled: Vec<usize>,
}

/// A domain's blocks of a size.
#[derive(Debug, Default)]
struct OfSize {
    /// By falling addresses.
    blocks: Vec<Place>,
    is_filled: bool,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    address: u64,
    id: BlockId,
}

impl Recent {
    /// Takes a domain's block of a size; of several, that at the lowest address.
    #[inline(always)]
    pub(super) fn take(&mut self, domain: DomainId, size: Bytes) -> Option<BlockId> {
        let domain = self.domains.get_mut(domain.index())?;
        let list = domain.sizes.get_mut(size_index(size))?;
        list.blocks.pop().map(|place| place.id)
    }

    /// Adds a freed block. Returns the block at the highest address if there are too many of the size.
    #[inline(always)]
    pub(super) fn put(&mut self, domain: DomainId, free: FreeBlock) -> Option<BlockId> {
        debug_assert!(free.size <= RECENT_MAX);
        let index = size_index(free.size);
        let known = self.domains.get_mut(domain.index());
        let OfDomain { sizes, filled } = match known {
            Some(known) if index < known.sizes.len() => known,
            _ => self.insert_size(domain, index),
        };
        let OfSize { blocks, is_filled } = &mut sizes[index];
        if !std::mem::replace(is_filled, true) {
            filled.push(index);
        }
        let (address, id) = (free.rank, free.id);
        let lower = blocks.iter().rev();
        let lower = lower.take_while(|place| place.address < address).count();
        blocks.insert(blocks.len() - lower, Place { address, id });
        (blocks.len() > BLOCKS_MAX).then(|| blocks.remove(0).id)
    }

    #[cold]
    fn insert_size(&mut self, domain: DomainId, index: usize) -> &mut OfDomain {
        if domain.index() >= self.domains.len() {
            self.domains
                .resize_with(domain.index() + 1, OfDomain::default);
        }
        let known = &mut self.domains[domain.index()];
        known.sizes.resize_with(index + 1, OfSize::default);
        known
    }

    /// Takes any block of a domain. Constant amortized time.
    #[inline]
    pub(super) fn pop(&mut self, domain: DomainId) -> Option<BlockId> {
        let OfDomain { sizes, filled } = self.domains.get_mut(domain.index())?;
        while let Some(&index) = filled.last() {
            let list = &mut sizes[index];
            if let Some(place) = list.blocks.pop() {
                return Some(place.id);
            }
            list.is_filled = false;
            filled.pop();
        }
        None
    }

    /// Drops the lists of a domain that ended. They are empty.
    pub(super) fn end(&mut self, domain: DomainId) {
        if let Some(ended) = self.domains.get_mut(domain.index()) {
            debug_assert!(ended.sizes.iter().all(|list| list.blocks.is_empty()));
            *ended = OfDomain::default();
        }
    }

    /// Returns every block with its domain's index and its size.
    pub(super) fn iter(&self) -> impl Iterator<Item = (BlockId, usize, Bytes)> {
        self.domains
            .iter()
            .enumerate()
            .flat_map(|(number, domain)| {
                let sizes = (0..).map(|index| Bytes(index * UNIT.get()));
                sizes.zip(&domain.sizes).flat_map(move |(size, list)| {
                    let blocks = list.blocks.iter();
                    blocks.map(move |place| (place.id, number, size))
                })
            })
    }
}

/// Returns the index of a block's size.
#[expect(
    clippy::cast_possible_truncation,
    reason = "addresses have 64 bits, as on each machine with a card"
)]
#[inline]
fn size_index(size: Bytes) -> usize {
    (size.get() / UNIT.get()) as usize
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;
    use crate::block::tests::block_id;

    proptest! {
        /// Compares with sorted sets after every change.
        #[test]
        fn serves_the_lowest_address_of_a_size(
            changes in prop::collection::vec((0..4_u8, 0..2_u16, 1..4_u64, 1..200_u32), 1..400),
        ) {
            let mut recent = Recent::default();
            let mut sets: BTreeMap<(u16, u64), BTreeSet<u32>> = BTreeMap::new();
            for (change, domain, units, number) in changes {
                let size = Bytes(units * UNIT.get());
                let is_listed = sets.values().any(|set| set.contains(&number));
                let set = sets.entry((domain, units)).or_default();
                let domain = DomainId::of_number(domain);
                if change == 0 {
                    prop_assert_eq!(recent.take(domain, size), set.pop_first().map(block_id));
                } else if !is_listed {
                    set.insert(number);
                    let rank = u64::from(number) << 9;
                    let free = FreeBlock { size, rank, id: block_id(number) };
                    let too_many = if set.len() > BLOCKS_MAX { set.pop_last() } else { None };
                    prop_assert_eq!(recent.put(domain, free), too_many.map(block_id));
                }
                let all = sets.iter().flat_map(|(&(domain, units), set)| {
                    let size = Bytes(units * UNIT.get());
                    let ids = set.iter().copied().map(block_id);
                    ids.map(move |id| (id, usize::from(domain), size))
                });
                let listed: BTreeSet<_> = recent.iter().collect();
                prop_assert_eq!(&listed, &all.collect());
            }
            let mut popped = BTreeSet::new();
            for number in 0..2 {
                let domain = DomainId::of_number(number);
                let of_domain = std::iter::from_fn(|| recent.pop(domain));
                popped.extend(of_domain.map(|id| (usize::from(number), id)));
                recent.end(domain);
            }
            let all = sets.iter().flat_map(|(&(domain, _), set)| {
                set.iter().map(move |&number| (usize::from(domain), block_id(number)))
            });
            prop_assert_eq!(popped, all.collect());
            prop_assert_eq!(recent.iter().count(), 0);
        }
    }
}
