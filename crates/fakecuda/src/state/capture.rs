//! A capture: the dependencies of the work that it recorded.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_uint;

use crate::calls::Outcome;
use crate::names::Thread;
use crate::sys::*;

/// A capture in progress.
#[derive(Debug)]
pub(crate) struct Capture {
    /// The stream that the capture began in, which must end it.
    pub(crate) origin: CUstream,
    pub(crate) mode: c_uint,
    pub(crate) thread: Thread,
    pub(crate) is_valid: bool,
    pub(crate) graph: CUgraph,
    /// For each stream that takes part, the nodes that its next work directly depends on.
    pub(crate) frontiers: BTreeMap<CUstream, Vec<CUgraphNode>>,
    /// The direct dependencies of each node.
    pub(crate) nodes: BTreeMap<CUgraphNode, Vec<CUgraphNode>>,
}

/// The position in a capture at which an event was recorded.
#[derive(Clone, Debug)]
pub(crate) struct Position {
    pub(crate) capture: u64,
    pub(crate) after: Vec<CUgraphNode>,
}

impl Capture {
    /// Returns whether the capture can end: it must be valid, and all work joined to the stream that it began in.
    pub(crate) fn outcome(&self) -> Outcome {
        if !self.is_valid {
            return Err(CUresult::STREAM_CAPTURE_INVALIDATED);
        }
        let mut joined = BTreeSet::new();
        let mut open = self.frontiers[&self.origin].clone();
        while let Some(node) = open.pop() {
            if joined.insert(node) {
                open.extend(&self.nodes[&node]);
            }
        }
        if joined.len() == self.nodes.len() {
            Ok(())
        } else {
            Err(CUresult::STREAM_CAPTURE_UNJOINED)
        }
    }
}
