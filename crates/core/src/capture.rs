//! The order of captured work: what the next work of a stream comes after in a graph.
//!
//! Captured work does not run, so no event shows when it is done. But the graph orders it: memory may be reused by
//! work that comes after all of its users.
//!
//! Every kind of dependency counts, as in PyTorch. With programmatic dependent launch, kernels may start before
//! their predecessor is done. The program is then responsible for the order, as outside of graphs, where a stream
//! reuses the memory that it freed at once.

use std::collections::{HashMap, HashSet};

use crate::driver::{CapturePoint, Driver, GraphNode};
use crate::units::Stream;

/// What is known of the graphs that are being captured.
#[derive(Debug, Default)]
pub(crate) struct CaptureOrder {
    pasts: HashMap<Stream, Past>,
}

/// The work that a stream's next work comes after.
#[derive(Debug, Default)]
struct Past {
    /// The stream's position at the last query.
    point: CapturePoint,
    /// All nodes of the graph that come before that position.
    nodes: HashSet<GraphNode>,
}

impl CaptureOrder {
    /// Updates what is known of a stream, and returns a test of whether its next work comes after all nodes of a
    /// point. Returns `None` if the stream is not being captured.
    ///
    /// Each stream queries the driver for each node once, so a capture takes time linear in its work for each such
    /// stream. If the driver does not report a node's dependencies, the node is treated as having none. That only
    /// keeps memory pending.
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
        // A program may change the order (`cudaStreamUpdateCaptureDependencies`).
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

    /// Removes everything: once a capture has ended, the names of its nodes may be reused.
    pub(crate) fn forget(&mut self) {
        self.pasts.clear();
    }
}

impl Past {
    /// Adds nodes and all their predecessors. Returns the known nodes that were reached.
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
