//! Graphs that are being captured: the dependencies between their nodes.

use std::collections::BTreeMap;

use lowtide_core::{CapturePoint, GraphNode, Stream};

/// The streams that are being captured, and the captured nodes.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    points: BTreeMap<Stream, CapturePoint>,
    nodes: BTreeMap<GraphNode, Node>,
    /// The numbers of nodes of ended captures. Later nodes get them again, as on a device.
    unused: Vec<GraphNode>,
    /// The number of captures that ever began.
    begun: u64,
}

#[derive(Debug)]
struct Node {
    capture: u64,
    /// The direct dependencies.
    after: Vec<GraphNode>,
}

impl Captures {
    pub(crate) fn begin(&mut self, stream: Stream) {
        self.begun += 1;
        let point = CapturePoint {
            capture: self.begun,
            after: Vec::new(),
        };
        self.points.insert(stream, point);
    }

    /// Ends a capture in all its streams.
    pub(crate) fn end(&mut self, capture: u64) {
        self.points.retain(|_, point| point.capture != capture);
        let unused = &mut self.unused;
        self.nodes.retain(|&name, node| {
            let goes_on = node.capture != capture;
            if !goes_on {
                unused.push(name);
            }
            goes_on
        });
    }

    pub(crate) fn point(&self, stream: Stream) -> Option<&CapturePoint> {
        self.points.get(&stream)
    }

    /// Returns the direct dependencies of a node, or `None` if there is no such node.
    pub(crate) fn dependencies(&self, node: GraphNode) -> Option<&[GraphNode]> {
        self.nodes.get(&node).map(|node| &node.after[..])
    }

    pub(crate) fn are_none(&self) -> bool {
        self.points.is_empty()
    }

    /// Adds a node to a stream's graph. Returns whether the stream is being captured.
    pub(crate) fn launch(&mut self, stream: Stream) -> bool {
        let Some(point) = self.points.get_mut(&stream) else {
            return false;
        };
        let newest = GraphNode(self.nodes.len() as u64);
        let node = self.unused.pop().unwrap_or(newest);
        let after = std::mem::replace(&mut point.after, vec![node]);
        let capture = point.capture;
        self.nodes.insert(node, Node { capture, after });
        true
    }

    /// Sets the dependencies of a captured stream's next work to `after`.
    pub(crate) fn set_order(&mut self, stream: Stream, after: &[GraphNode]) {
        if let Some(point) = self.points.get_mut(&stream) {
            point.after = after.to_vec();
        }
    }

    /// Makes the next work of `stream` depend on the captured work of `other`. `stream` joins the capture.
    pub(crate) fn wait(&mut self, stream: Stream, other: &CapturePoint) {
        let joined = self.points.entry(stream).or_insert_with(|| CapturePoint {
            capture: other.capture,
            after: Vec::new(),
        });
        for &node in &other.after {
            if !joined.after.contains(&node) {
                joined.after.push(node);
            }
        }
    }
}
