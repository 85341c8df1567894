//! Recently freed blocks, which the next request of their size reuses as they are.

use crate::block::{BlockId, BlockState};
use crate::domain::DomainId;
use crate::segment::Heap;
use crate::units::Bytes;

/// Each size class keeps this many bytes of blocks, but at least [`BLOCKS_MIN`] and at most [`BLOCKS_MAX`]
/// blocks. Keeping more is faster but takes more memory. Measured with 10,000 live blocks of random sizes up to 1 MiB:
/// an allocation and its free took 82 ns with 8 blocks of each class and 68 ns with 32. With 32 of the large ones too,
/// recorded jobs took up to a tenth more memory.
const CLASS_BYTES_MAX: Bytes = Bytes::mib(2);
const BLOCKS_MIN: u64 = 8;
const BLOCKS_MAX: u64 = 32;

/// A few free blocks for each domain and size class, the newest on top.
///
/// Merging a block with its neighbours only to split it again is most of the cost of a small request, and a job soon
/// requests again what it freed. So merging is delayed, as in the lazy buddy systems of Barkley and Lee (1989). The
/// delay is limited to a bounded number of blocks. The strategy ends it: at the latest when a request finds nothing else.
#[derive(Debug, Default)]
pub(super) struct RecentBlocks {
    /// By [`DomainId::index`].
    domains: Vec<OfDomain>,
}

/// The blocks of one domain.
#[derive(Debug, Default)]
struct OfDomain {
    classes: Vec<RecentClass>,
    /// The index of each class with blocks, and of some without.
    filled: Vec<usize>,
    /// The number of blocks.
    len: usize,
}

/// The blocks of one size class in one domain, the newest last.
#[derive(Debug, Default)]
struct RecentClass {
    blocks: Vec<BlockId>,
    /// How many are kept; zero before the first.
    blocks_max: usize,
    is_filled: bool,
}

impl RecentBlocks {
    /// Takes the block of a class that was freed last.
    #[inline(always)]
    pub(super) fn take(&mut self, (domain, class): (DomainId, usize)) -> Option<BlockId> {
        let domain = self.domains.get_mut(domain.index())?;
        let id = domain.classes.get_mut(class)?.blocks.pop()?;
        domain.len -= 1;
        Some(id)
    }

    /// Returns whether a domain has no block.
    #[inline]
    pub(super) fn is_empty(&self, domain: DomainId) -> bool {
        let known = self.domains.get(domain.index());
        known.is_none_or(|domain| domain.len == 0)
    }

    /// Adds a freed block of a domain and class. Returns the one that was freed first if there are too many, to be merged.
    #[inline(always)]
    pub(super) fn put(
        &mut self,
        (domain, class): (DomainId, usize),
        (id, size): (BlockId, Bytes),
    ) -> Option<BlockId> {
        let known = self.domains.get_mut(domain.index());
        let OfDomain {
            classes,
            filled,
            len,
        } = match known {
            Some(known) if class < known.classes.len() => known,
            _ => self.insert_class(domain, class),
        };
        let recent = &mut classes[class];
        if !recent.is_filled {
            recent.start(size);
            filled.push(class);
        }
        recent.blocks.push(id);
        if recent.blocks.len() <= recent.blocks_max {
            *len += 1;
            return None;
        }
        Some(recent.blocks.remove(0))
    }

    /// Takes any block of a domain, to be merged. Constant amortized time.
    #[inline]
    pub(super) fn pop(&mut self, domain: DomainId) -> Option<BlockId> {
        let OfDomain {
            classes,
            filled,
            len,
        } = self.domains.get_mut(domain.index())?;
        while let Some(&class) = filled.last() {
            let recent = &mut classes[class];
            if let Some(id) = recent.blocks.pop() {
                *len -= 1;
                return Some(id);
            }
            recent.is_filled = false;
            filled.pop();
        }
        None
    }

    /// Returns every block.
    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> {
        let classes = self.domains.iter().flat_map(|domain| &domain.classes);
        classes.flat_map(|recent| recent.blocks.iter().copied())
    }

    /// Checks that every block has a state, and is in the class that `class_of` returns for its size. Returns the bytes
    /// of all.
    ///
    /// # Errors
    ///
    /// A sentence that names the block that is not.
    pub(super) fn check(
        &self,
        heap: &Heap,
        state: BlockState,
        class_of: impl Fn(Bytes) -> usize,
    ) -> Result<Bytes, String> {
        let mut bytes = Bytes::ZERO;
        for (domain, OfDomain { classes, .. }) in self.domains.iter().enumerate() {
            for (class, recent) in classes.iter().enumerate() {
                for block in recent.blocks.iter().map(|&id| heap.blocks.get(id)) {
                    let found = (block.state, block.domain.index(), class_of(block.size));
                    if found != (state, domain, class) {
                        return Err(format!(
                            "{} is not free or in the wrong class",
                            block.address
                        ));
                    }
                    bytes += block.size;
                }
            }
        }
        Ok(bytes)
    }

    #[cold]
    fn insert_class(&mut self, domain: DomainId, class: usize) -> &mut OfDomain {
        if domain.index() >= self.domains.len() {
            self.domains
                .resize_with(domain.index() + 1, OfDomain::default);
        }
        let known = &mut self.domains[domain.index()];
        known.classes.resize_with(class + 1, RecentClass::default);
        known
    }
}

impl RecentClass {
    /// Starts to keep blocks of a size.
    #[inline(never)]
    fn start(&mut self, size: Bytes) {
        let blocks_max = (CLASS_BYTES_MAX.get() / size.get()).clamp(BLOCKS_MIN, BLOCKS_MAX);
        self.blocks_max = blocks_max as usize;
        self.is_filled = true;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet, VecDeque};

    use proptest::prelude::*;

    use super::*;
    use crate::block::tests::block_id;

    proptest! {
        /// Compares with queues after every change.
        #[test]
        fn serves_the_newest_and_gives_up_the_oldest(
            changes in prop::collection::vec((0..6_u8, 0..2_u16, 1..4_usize, 1..200_u32), 1..400),
        ) {
            let mut recent = RecentBlocks::default();
            let mut queues: BTreeMap<(u16, usize), VecDeque<u32>> = BTreeMap::new();
            for (change, number, class, block) in changes {
                let (domain, size) = (DomainId::of_number(number), Bytes::kib(100 * class as u64));
                let most = [0, 20, 10, 8][class];
                let is_listed = queues.values().any(|queue| queue.contains(&block));
                let queue = queues.entry((number, class)).or_default();
                if change == 0 {
                    prop_assert_eq!(recent.take((domain, class)), queue.pop_back().map(block_id));
                } else if change == 1 && block < 20 {
                    let all = std::iter::from_fn(|| recent.pop(domain)).collect::<BTreeSet<_>>();
                    let of_domain = queues.iter_mut().filter(|&(&(of, _), _)| of == number);
                    let expected = of_domain.flat_map(|(_, queue)| queue.drain(..)).map(block_id);
                    prop_assert_eq!(all, expected.collect());
                } else if !is_listed {
                    queue.push_back(block);
                    let oldest = if queue.len() > most { queue.pop_front() } else { None };
                    let place = (domain, class);
                    prop_assert_eq!(recent.put(place, (block_id(block), size)), oldest.map(block_id));
                }
                let listed: BTreeSet<BlockId> = recent.iter().collect();
                prop_assert_eq!(listed.len(), recent.iter().count());
                for number in 0..2 {
                    let mut classes = queues.range((number, 0)..(number + 1, 0));
                    let is_empty = classes.all(|(_, queue)| queue.is_empty());
                    prop_assert_eq!(is_empty, recent.is_empty(DomainId::of_number(number)));
                }
                prop_assert_eq!(listed, queues.values().flatten().copied().map(block_id).collect());
            }
        }
    }
}
