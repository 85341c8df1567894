//! When chunks were freed, beside the safe frontier: a count of frees and marks.

/// How frees are counted.
#[derive(Default, Debug)]
pub(super) struct Timing {
    /// The count of the latest free or mark.
    pub(super) count: u64,
    /// What was freed at a count below this is safe.
    pub(super) frontier: u64,
}

impl Timing {
    /// Counts a free and returns its count; zero where the frontier has passed it already.
    pub(super) fn count_free(&mut self) -> u64 {
        self.count += 1;
        if self.count < self.frontier {
            0
        } else {
            self.count
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Timing;

    /// What is freed at the frontier or later is not known to be safe.
    #[test]
    fn frees_below_the_frontier_are_safe() {
        let mut timing = Timing {
            count: 3,
            frontier: 6,
        };
        let counts = [(); 4].map(|()| timing.count_free());
        assert_eq!(counts, [0, 0, 6, 7]);
    }
}
