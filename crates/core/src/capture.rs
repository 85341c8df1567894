//! The order of captured work: what the next work of a stream comes after in a graph.
//!
//! Captured work does not run, so no event tells when it is done. But the graph says what comes after
//! what, and memory may serve again what comes after all that used it.
//!
//! The order counts whatever its kind, as in PyTorch. Of kernels that start before the one ahead of them is
//! done (programmatic dependent launch) the program sees to the order, as it does outside of graphs, where
//! memory that a stream freed serves the same stream at once.

use std::collections::{HashMap, HashSet};

use crate::driver::{CapturePoint, Driver, GraphNode};
use crate::units::Stream;

/// What is known of the graphs that are being captured.
#[derive(Debug, Default)]
pub(crate) struct CaptureOrder {
    pasts: HashMap<Stream, Past>,
}

/// What the next work of a stream comes after.
#[derive(Debug, Default)]
struct Past {
    /// Where the stream was when it was last asked about.
    point: CapturePoint,
    /// All of the graph that comes before that.
    nodes: HashSet<GraphNode>,
}

impl CaptureOrder {
    /// Brings what is known of a stream up to date, and returns a test of whether its next work comes
    /// after all that a point comes after; `None` where the stream is not being captured.
    ///
    /// Each stream asks the driver about each node once, so that a capture takes time linear in its work,
    /// for each stream that is asked about. A node of which the driver does not say what it comes after is
    /// taken to come after nothing, which only keeps memory waiting.
    pub(crate) fn follow<D: Driver>(
        &mut self,
        driver: &mut D,
        stream: Stream,
    ) -> Option<impl Fn(&CapturePoint) -> bool> {
        let point = driver.capture_point(stream)?;
        let past = self.pasts.entry(stream).or_default();
        if past.point.capture != point.capture {
            *past = Past::default();
        }
        let met = past.add(driver, &point.after);
        // A program may set the order anew (`cudaStreamUpdateCaptureDependencies`).
        if !past.point.after.iter().all(|node| met.contains(node)) {
            past.nodes.clear();
            past.add(driver, &point.after);
        }
        debug_assert!(point.after.iter().all(|node| past.nodes.contains(node)));
        past.point = point;
        let past = &*past;
        Some(|point: &CapturePoint| {
            let mut nodes = point.after.iter();
            point.capture == past.point.capture && nodes.all(|node| past.nodes.contains(node))
        })
    }

    /// Forgets all, as the names of nodes may mean others once a capture has ended.
    pub(crate) fn forget(&mut self) {
        self.pasts.clear();
    }
}

impl Past {
    /// Adds nodes and all that they come after; returns those that were met on the way to what was known.
    fn add<D: Driver>(&mut self, driver: &mut D, nodes: &[GraphNode]) -> HashSet<GraphNode> {
        let mut met = HashSet::new();
        let mut open = nodes.to_vec();
        while let Some(node) = open.pop() {
            met.insert(node);
            if self.nodes.insert(node) {
                open.extend(driver.dependencies(node));
            }
        }
        met
    }
}
