//! Buddy trees: which parts of a domain's arenas are free. This module has no addresses, only granules.
//!
//! A tree is stored as bits. A node of order `n` is 2ⁿ granules at a multiple of 2ⁿ. For each order there is a
//! set of the numbers of its free nodes whose buddy is not free. A node's buddy has the same number with the last
//! bit flipped. The number of orders follows from the tree's size.

use crate::strategy::bit_set::BitSet;

/// A contiguous range of `units << order` granules, with `units` from 1 to 16. It starts where a node of
/// [`Run::enclosing_order`] starts.
///
/// So a run is a buddy that is not rounded up to a power of two: the rest of the node behind it stays free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::strategy) struct Run {
    pub(in crate::strategy) units: u64,
    pub(in crate::strategy) order: u32,
}

impl Run {
    pub(in crate::strategy) const fn granules(self) -> u64 {
        self.units << self.order
    }

    /// Returns the order of the smallest node that holds the run.
    pub(in crate::strategy) const fn enclosing_order(self) -> u32 {
        self.order + self.units.next_power_of_two().trailing_zeros()
    }
}

/// The position of a run: the number of its tree, and the granules in front of it there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Position {
    pub(super) tree: usize,
    pub(super) granule: u64,
}

/// Any number of trees, searched together.
#[derive(Debug, Default)]
pub(super) struct Forest {
    /// By the number of the tree; `None` if it was removed.
    trees: Vec<Option<Tree>>,
    /// For each order, the trees whose largest free node has that order.
    by_largest: Vec<BitSet>,
    /// Bit `n` is set exactly if `by_largest[n]` is not empty.
    largest_orders: u64,
}

#[derive(Debug)]
struct Tree {
    /// Its free nodes, by order. The last order has one node, the tree.
    free: Vec<FreeNodes>,
    /// Bit `n` is set exactly if a node of order `n` is free.
    orders: u64,
}

/// The free nodes of one order of a tree.
#[derive(Debug)]
struct FreeNodes {
    /// The lowest number; stale if no node is free.
    ///
    /// Stored separately because most orders of a nearly empty tree have one free node. Halving such a tree down
    /// to a granule, and merging it again, then takes one write per order.
    first: usize,
    /// The others.
    rest: BitSet,
}

impl Forest {
    /// Adds a tree of one free node and returns its number. Linear in its granules, with a bit for each.
    pub(super) fn insert_tree(&mut self, order: u32) -> usize {
        let number = self.trees.iter().position(Option::is_none);
        let number = number.unwrap_or_else(|| {
            self.trees.push(None);
            self.trees.len() - 1
        });
        self.trees[number] = Some(Tree::new(order));
        if self.by_largest.len() <= order as usize {
            self.by_largest
                .resize_with(order as usize + 1, BitSet::default);
        }
        for trees in &mut self.by_largest {
            trees.reserve(self.trees.len());
        }
        self.move_tree(number, None, Some(order));
        number
    }

    /// Removes a tree that is wholly free.
    pub(super) fn remove_tree(&mut self, number: usize) {
        debug_assert!(self.is_free(number), "a tree in use stays");
        let largest = self.tree(number).largest();
        self.move_tree(number, largest, None);
        self.trees[number] = None;
    }

    /// Takes a run and returns its position. `None` if no node is large enough.
    ///
    /// The tree is the one whose largest free node is the smallest that holds the run; of several, the first. So
    /// nearly empty trees become empty. In the tree, the run goes to the start of the smallest node that holds
    /// it; of several, the first. So long-lived runs gather at one end. The rest of the node becomes free nodes.
    /// Logarithmic in the size of the tree.
    #[inline]
    pub(super) fn take(&mut self, run: Run) -> Option<Position> {
        let sufficient = self.largest_orders & (u64::MAX << run.enclosing_order());
        if sufficient == 0 {
            return None;
        }
        let largest = sufficient.trailing_zeros();
        let number = self.by_largest[largest as usize].first()?;
        let tree = self.tree_mut(number);
        let granule = tree.take(run);
        let now = tree.largest();
        self.move_tree(number, Some(largest), now);
        Some(Position {
            tree: number,
            granule,
        })
    }

    /// Takes a run at a position where all of it is free. Logarithmic in the size of the tree.
    pub(super) fn take_at(&mut self, position: Position, run: Run) {
        let tree = self.tree_mut(position.tree);
        let largest = tree.largest();
        tree.take_at(position.granule, run);
        let now = tree.largest();
        self.move_tree(position.tree, largest, now);
    }

    /// Puts a run back and merges it with its free buddies. Logarithmic in the size of the tree.
    #[inline]
    pub(super) fn put(&mut self, position: Position, run: Run) {
        let tree = self.tree_mut(position.tree);
        let largest = tree.largest();
        tree.put(position.granule, run);
        let now = tree.largest();
        self.move_tree(position.tree, largest, now);
    }

    /// Records that the order of a tree's largest free node changed.
    #[inline]
    fn move_tree(&mut self, number: usize, from: Option<u32>, to: Option<u32>) {
        if from == to {
            return;
        }
        if let Some(order) = from {
            let trees = &mut self.by_largest[order as usize];
            let was_listed = trees.remove(number);
            debug_assert!(was_listed, "a tree is listed by its largest node");
            if trees.is_empty() {
                self.largest_orders &= !(1 << order);
            }
        }
        if let Some(order) = to {
            debug_assert!(!self.by_largest[order as usize].contains(number));
            self.by_largest[order as usize].insert(number);
            self.largest_orders |= 1 << order;
        }
    }

    /// Returns whether a tree is wholly free.
    pub(super) fn is_free(&self, number: usize) -> bool {
        self.tree(number).is_free()
    }

    /// Returns the size of the largest free node in granules; 0 if none is free.
    pub(super) fn largest_free(&self) -> u64 {
        let order = self.largest_orders.checked_ilog2();
        order.map_or(0, |order| 1 << order)
    }

    /// Returns the free nodes of a tree: first granule and number of granules of each.
    pub(super) fn free_nodes(&self, number: usize) -> impl Iterator<Item = (u64, u64)> {
        let tree = self.tree(number);
        let orders = (0..=tree.order()).filter(|order| tree.orders >> order & 1 == 1);
        orders.flat_map(|order| {
            let nodes = &tree.free[order as usize];
            let numbers = std::iter::once(nodes.first).chain(nodes.rest.iter());
            numbers.map(move |node| ((node as u64) << order, 1 << order))
        })
    }

    /// Returns the numbers of all trees.
    pub(super) fn trees(&self) -> impl Iterator<Item = usize> {
        (0..self.trees.len()).filter(|&number| self.trees[number].is_some())
    }

    /// Checks the sets, and that no two buddies are both free. `Arenas::check` compares the free nodes with the
    /// taken runs, so it finds overlaps.
    ///
    /// # Errors
    ///
    /// A sentence that says what is wrong.
    pub(super) fn check(&self) -> Result<(), String> {
        for number in self.trees() {
            self.tree(number).check()?;
        }
        for (order, trees) in (0_u32..).zip(&self.by_largest) {
            trees.check()?;
            let belongs = |&number: &usize| self.tree(number).largest() == Some(order);
            if !trees.iter().eq(self.trees().filter(belongs)) {
                return Err(format!(
                    "the trees with a largest free node of order {order} differ"
                ));
            }
            if (self.largest_orders >> order & 1 == 1) == trees.is_empty() {
                return Err(format!("the bit of order {order} is wrong"));
            }
        }
        Ok(())
    }

    #[inline]
    fn tree(&self, number: usize) -> &Tree {
        self.trees[number].as_ref().expect("the tree is there")
    }

    #[inline]
    fn tree_mut(&mut self, number: usize) -> &mut Tree {
        self.trees[number].as_mut().expect("the tree is there")
    }
}

impl Tree {
    fn new(order: u32) -> Tree {
        let nodes = (0..=order).map(|below| FreeNodes {
            first: 0,
            rest: BitSet::with_capacity(index(1 << (order - below))),
        });
        Tree {
            free: nodes.collect(),
            orders: 1 << order,
        }
    }

    #[inline]
    fn take(&mut self, run: Run) -> u64 {
        let order = (self.orders & (u64::MAX << run.enclosing_order())).trailing_zeros();
        let node = self.free[order as usize].first;
        self.remove_first(order);
        let granule = (node as u64) << order;
        let node_end = granule + (1 << order);
        debug_assert!(run.granules() <= 1 << order, "the node holds the run");
        let mut end = granule + run.granules();
        while end < node_end {
            let order = end.trailing_zeros();
            self.insert(order, index(end >> order));
            end += 1 << order;
        }
        granule
    }

    fn take_at(&mut self, mut granule: u64, run: Run) {
        let mut rest = run.granules();
        while rest > 0 {
            let order = rest.ilog2();
            self.take_node(order, granule);
            granule += 1 << order;
            rest -= 1 << order;
        }
    }

    /// Takes the node of order `order` that starts at `granule`, by splitting the free node that contains it.
    fn take_node(&mut self, order: u32, granule: u64) {
        let mut orders = order..=self.order();
        let whole = orders.find(|&whole| self.remove(whole, index(granule >> whole)));
        let whole = whole.expect("the node is free");
        for half in order..whole {
            self.insert(half, index(granule >> half) ^ 1);
        }
    }

    #[inline]
    fn put(&mut self, mut granule: u64, run: Run) {
        let mut rest = run.granules();
        // A run starts where a node that holds it starts. So its parts, largest first, are nodes.
        while rest > 0 {
            let order = rest.ilog2();
            self.put_node(order, index(granule >> order));
            granule += 1 << order;
            rest -= 1 << order;
        }
    }

    /// Puts a node back and merges it with its free buddies.
    #[inline]
    fn put_node(&mut self, mut order: u32, mut node: usize) {
        while self.remove(order, node ^ 1) {
            node /= 2;
            order += 1;
        }
        self.insert(order, node);
    }

    #[inline]
    fn insert(&mut self, order: u32, node: usize) {
        let nodes = &mut self.free[order as usize];
        if self.orders >> order & 1 == 0 {
            debug_assert!(
                nodes.rest.is_empty(),
                "of an order without nodes there are no others"
            );
            nodes.first = node;
            self.orders |= 1 << order;
        } else if node < nodes.first {
            debug_assert!(!nodes.rest.contains(nodes.first));
            nodes.rest.insert(nodes.first);
            nodes.first = node;
        } else {
            debug_assert_ne!(node, nodes.first, "a node is put back once");
            debug_assert!(!nodes.rest.contains(node), "a node is put back once");
            nodes.rest.insert(node);
        }
    }

    /// Removes a node from the free nodes. Returns whether it was free.
    #[inline]
    fn remove(&mut self, order: u32, node: usize) -> bool {
        if self.orders >> order & 1 == 0 {
            return false;
        }
        let nodes = &mut self.free[order as usize];
        if nodes.first == node {
            self.remove_first(order);
            return true;
        }
        node > nodes.first && nodes.rest.remove(node)
    }

    #[inline]
    fn remove_first(&mut self, order: u32) {
        let nodes = &mut self.free[order as usize];
        match nodes.rest.first() {
            Some(second) => {
                debug_assert!(second > nodes.first);
                nodes.rest.remove(second);
                nodes.first = second;
            }
            None => self.orders &= !(1 << order),
        }
    }

    /// Returns whether the tree is wholly free.
    #[inline]
    fn is_free(&self) -> bool {
        self.orders >> self.order() == 1
    }

    /// Returns the order of the largest free node, if any is free.
    #[inline]
    fn largest(&self) -> Option<u32> {
        self.orders.checked_ilog2()
    }

    fn check(&self) -> Result<(), String> {
        for (order, nodes) in self.free.iter().enumerate() {
            nodes.rest.check()?;
            let members: Vec<usize> = match self.orders >> order & 1 {
                1 => std::iter::once(nodes.first)
                    .chain(nodes.rest.iter())
                    .collect(),
                _ => nodes.rest.iter().collect(),
            };
            let has_free = self.orders >> order & 1 == 1;
            if members.is_empty() == has_free || !members.is_sorted() {
                return Err(format!("the free nodes of order {order} are not in order"));
            }
            if members.windows(2).any(|pair| pair[0] ^ 1 == pair[1]) {
                return Err(format!("two buddies of order {order} are both free"));
            }
        }
        Ok(())
    }

    /// Returns the order of the whole tree.
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a tree has fewer orders than a u64 has bits"
    )]
    fn order(&self) -> u32 {
        self.free.len() as u32 - 1
    }
}

fn index(number: u64) -> usize {
    usize::try_from(number).expect("the number of nodes fits a usize")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The reference: a tree as a row of granules, each free or not.
    struct Model(Vec<bool>);

    impl Model {
        /// Returns the free nodes: the largest aligned powers of two that are wholly free.
        fn free_nodes(&self) -> Vec<(u64, u64)> {
            let mut nodes = Vec::new();
            let mut start = 0;
            while start < self.0.len() {
                let fits = |&size: &usize| {
                    start % size == 0
                        && self
                            .0
                            .get(start..start + size)
                            .is_some_and(|node| node.iter().all(|&free| free))
                };
                match (0..20).map(|order| 1 << order).take_while(fits).last() {
                    Some(size) => {
                        nodes.push((start as u64, size as u64));
                        start += size;
                    }
                    None => start += 1,
                }
            }
            nodes
        }

        /// Returns the position of the next run: the start of the smallest node that holds it; of several, the
        /// first.
        fn place(&self, run: Run) -> Option<(u64, u64)> {
            let least = 1 << run.enclosing_order();
            let nodes = self.free_nodes().into_iter().filter(|node| node.1 >= least);
            nodes.min_by_key(|&(start, size)| (size, start))
        }

        fn set(&mut self, start: u64, run: Run, free: bool) {
            let range = index(start)..index(start + run.granules());
            for granule in &mut self.0[range] {
                assert_ne!(*granule, free);
                *granule = free;
            }
        }
    }

    fn runs() -> impl proptest::strategy::Strategy<Value = Run> {
        (1..=16_u64, 0..6_u32).prop_map(|(units, order)| Run { units, order })
    }

    proptest! {
        /// Compares positions and free nodes of two trees of different sizes with the reference.
        #[test]
        fn does_as_rows_of_granules_do(
            steps in prop::collection::vec((any::<bool>(), runs(), any::<usize>()), 1..200),
        ) {
            let mut forest = Forest::default();
            let mut models = [Model(vec![true; 128]), Model(vec![true; 512])];
            prop_assert_eq!(forest.insert_tree(7), 0);
            prop_assert_eq!(forest.insert_tree(9), 1);
            let mut live = Vec::new();
            for (add, run, pick) in steps {
                if add {
                    let places = (0..).zip(&models).filter_map(|(tree, model): (usize, _)| {
                        let (granule, _) = model.place(run)?;
                        let largest = model.free_nodes().into_iter().map(|node| node.1).max()?;
                        Some((largest, tree, granule))
                    });
                    let expected = places.min().map(|(_, tree, granule)| Position { tree, granule });
                    let taken = forest.take(run);
                    prop_assert_eq!(taken, expected);
                    let Some(position) = taken else { continue };
                    models[position.tree].set(position.granule, run, false);
                    live.push((position, run));
                } else if live.is_empty() {
                    continue;
                } else {
                    let (position, run) = live.swap_remove(pick % live.len());
                    models[position.tree].set(position.granule, run, true);
                    forest.put(position, run);
                }
                prop_assert_eq!(forest.check(), Ok(()));
                for (tree, model) in models.iter().enumerate() {
                    let mut nodes: Vec<_> = forest.free_nodes(tree).collect();
                    nodes.sort_unstable();
                    prop_assert_eq!(nodes, model.free_nodes());
                }
            }
        }
    }

    #[test]
    fn a_tree_has_the_orders_of_its_own_size() {
        let mut forest = Forest::default();
        // A TiB of 1 KiB granules.
        forest.insert_tree(30);
        let smallest = Run { units: 1, order: 0 };
        let position = forest.take(smallest).unwrap();
        assert_eq!(
            position,
            Position {
                tree: 0,
                granule: 0
            }
        );
        let halves = (0..30).map(|order| (1 << order, 1 << order));
        assert!(forest.free_nodes(0).eq(halves));
        assert_eq!(
            forest.take(Run {
                units: 1,
                order: 30
            }),
            None
        );
        let half = Run {
            units: 1,
            order: 29,
        };
        assert_eq!(forest.take(half).unwrap().granule, 1 << 29);
        assert_eq!(forest.largest_free(), 1 << 28);
        forest.put(position, smallest);
        forest.put(
            Position {
                tree: 0,
                granule: 1 << 29,
            },
            half,
        );
        assert!(forest.is_free(0));
    }

    #[test]
    fn trees_come_and_go() {
        let mut forest = Forest::default();
        let trees: Vec<usize> = (0..100).map(|_| forest.insert_tree(3)).collect();
        let whole = Run { units: 1, order: 3 };
        for &tree in &trees {
            assert_eq!(forest.take(whole), Some(Position { tree, granule: 0 }));
        }
        assert_eq!(forest.take(whole), None);
        forest.put(
            Position {
                tree: 70,
                granule: 0,
            },
            whole,
        );
        forest.remove_tree(70);
        assert_eq!(forest.take(whole), None);
        assert_eq!(forest.insert_tree(9), 70);
        assert_eq!(
            forest.take(whole),
            Some(Position {
                tree: 70,
                granule: 0
            })
        );
        assert_eq!(forest.check(), Ok(()));
    }
}
