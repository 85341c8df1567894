//! Graphs that are being captured: which work comes after which.

use std::collections::BTreeMap;

use lowtide_core::{CapturePoint, GraphNode, Stream};

/// The streams that are being captured, and the work that they captured.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    points: BTreeMap<Stream, CapturePoint>,
    /// What each node comes directly after; their numbers are places in here.
    nodes: Vec<Vec<GraphNode>>,
    /// How many captures there ever were.
    begun: u64,
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
    }

    pub(crate) fn point(&self, stream: Stream) -> Option<&CapturePoint> {
        self.points.get(&stream)
    }

    pub(crate) fn dependencies(&self, node: GraphNode) -> &[GraphNode] {
        let place = usize::try_from(node.0).expect("as many nodes as fit in memory");
        &self.nodes[place]
    }

    pub(crate) fn are_none(&self) -> bool {
        self.points.is_empty()
    }

    /// Adds work to a stream's graph; returns whether the stream is being captured.
    pub(crate) fn launch(&mut self, stream: Stream) -> bool {
        let Some(point) = self.points.get_mut(&stream) else {
            return false;
        };
        let node = GraphNode(self.nodes.len() as u64);
        let dependencies = std::mem::replace(&mut point.after, vec![node]);
        self.nodes.push(dependencies);
        true
    }

    /// Has the next work of a captured stream come after `after` and nothing else.
    pub(crate) fn set_order(&mut self, stream: Stream, after: &[GraphNode]) {
        if let Some(point) = self.points.get_mut(&stream) {
            point.after = after.to_vec();
        }
    }

    /// Has the next work of `stream` come after what `other` captured; `stream` takes part from then on.
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
