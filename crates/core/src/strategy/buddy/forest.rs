//! Buddy trees: which parts of a domain's arenas are free. Nothing here knows addresses.
//!
//! A tree is not kept as nodes. A node of order `n` is 2ⁿ granules at a multiple of 2ⁿ, and for each
//! order there is a set of the numbers of the nodes that are free and whose buddy, the node with the
//! last bit of its number flipped, is not. How many orders a tree has follows from its own size.

use crate::strategy::bit_set::BitSet;

/// Some granules in a row: `units << order`, with `units` from 1 to 16. It starts where a node of
/// [`Run::enclosing_order`] starts.
///
/// So a run is what buddies are without rounding to the next power of two: cut to its own size,
/// what is behind it stays in the tree.
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

/// Where a run is: the number of its tree, and the granules in front of it there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Position {
    pub(super) tree: usize,
    pub(super) granule: u64,
}

/// Any number of trees, searched together.
#[derive(Debug, Default)]
pub(super) struct Forest {
    /// By the number of the tree; `None` where it was removed.
    trees: Vec<Option<Tree>>,
    /// For each order, the trees whose largest free node is of it.
    by_largest: Vec<BitSet>,
    /// Bit `n` is set exactly when `by_largest[n]` is not empty.
    largest_orders: u64,
}

#[derive(Debug)]
struct Tree {
    /// Its free nodes, by order. The last order has one node, the tree.
    free: Vec<FreeNodes>,
    /// Bit `n` is set exactly when nodes of order `n` are free.
    orders: u64,
}

/// The free nodes of one order of a tree.
#[derive(Debug)]
struct FreeNodes {
    /// The lowest number; stale where none is free.
    ///
    /// Kept apart because in a tree that is nearly empty, most orders have one free node: to halve
    /// such a tree down to a granule, and to merge it again, takes one write for each order.
    first: usize,
    /// The others.
    rest: BitSet,
}

impl Forest {
    /// Adds a tree of one free node and returns its number. Linear in its granules, a bit for each.
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

    /// Removes a tree that is free as a whole.
    pub(super) fn remove_tree(&mut self, number: usize) {
        debug_assert!(self.is_free(number), "a tree in use stays");
        let largest = self.tree(number).largest();
        self.move_tree(number, largest, None);
        self.trees[number] = None;
    }

    /// Takes a run and returns where it is, or `None` where no node is large enough.
    ///
    /// Takes it from the tree whose largest free node is the smallest that holds it, so that trees
    /// which are nearly empty become empty; of several, from the first. There it takes the smallest
    /// node that holds it, of several the first, at its start, so that what lives long gathers at one
    /// end. What is left becomes free nodes. Constant time but for the depth of the tree.
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

    /// Takes a run at a position where all of it is free. Constant time but for the depth of the tree.
    pub(super) fn take_at(&mut self, position: Position, run: Run) {
        let tree = self.tree_mut(position.tree);
        let largest = tree.largest();
        tree.take_at(position.granule, run);
        let now = tree.largest();
        self.move_tree(position.tree, largest, now);
    }

    /// Puts a run back and merges it with its free buddies. Constant time but for the depth of the
    /// tree.
    #[inline]
    pub(super) fn put(&mut self, position: Position, run: Run) {
        let tree = self.tree_mut(position.tree);
        let largest = tree.largest();
        tree.put(position.granule, run);
        let now = tree.largest();
        self.move_tree(position.tree, largest, now);
    }

    /// Notes that the largest free node of a tree is now of another order.
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

    /// Returns whether a tree is free as a whole.
    pub(super) fn is_free(&self, number: usize) -> bool {
        self.tree(number).is_free()
    }

    /// Returns the granules of the largest free node.
    pub(super) fn largest_free(&self) -> u64 {
        let order = self.largest_orders.checked_ilog2();
        order.map_or(0, |order| 1 << order)
    }

    /// Returns the free nodes of a tree as granules: where each starts and how many it has.
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

    /// Checks the sets, and that no two buddies are both free. That free nodes do not overlap shows
    /// where they are laid beside what is taken.
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

    /// Takes the node of an order that starts at a granule out of the free one that it is a part of.
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
        // A run starts where a node that holds it does: its parts, largest first, are nodes.
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

    /// Takes a node out if it is free, and returns whether it was.
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

    /// Returns whether all of it is free.
    #[inline]
    fn is_free(&self) -> bool {
        self.orders >> self.order() == 1
    }

    /// Returns the order of its largest free node.
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

    /// A tree as a row of granules, each free or not.
    struct Model(Vec<bool>);

    impl Model {
        /// Returns the free nodes: the largest aligned powers of two in which all is free.
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

        /// Returns where a run goes: the start of the smallest node that holds it, of several the
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
        /// Places and free nodes in two trees of different sizes, against granules.
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
