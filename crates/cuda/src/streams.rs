//! Streams: waits between them, captures, and what goes through them.

use std::ptr;

use lowtide_core::{Bytes, CapturePoint, DeviceAddress, DriverError, GraphNode, Stream};

use crate::driver::{CudaDriver, host_size, raw_stream};
use crate::library::{call, call_optional};
use crate::sys::{CUgraphEdgeData, CUgraphNode, CUstreamCaptureStatus};

/// What becomes of the work that is put into a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CaptureStatus {
    /// It runs.
    None,
    /// It goes into a graph.
    Active,
    /// It is refused: a forbidden call spoiled the capture, which has not been ended.
    Invalidated,
}

impl CaptureStatus {
    pub(crate) fn from_raw(raw: CUstreamCaptureStatus) -> CaptureStatus {
        match raw {
            CUstreamCaptureStatus::NONE => CaptureStatus::None,
            CUstreamCaptureStatus::ACTIVE => CaptureStatus::Active,
            // There is one more. What a later driver may add is not known to run or to be captured.
            _ => CaptureStatus::Invalidated,
        }
    }
}

impl CudaDriver {
    /// Returns whether `stream` is being captured.
    ///
    /// # Errors
    ///
    /// What the driver says: for the default stream an error while another stream is being captured, as
    /// work there would have to wait for the capture.
    pub fn capture_status(&self, stream: Stream) -> Result<CaptureStatus, DriverError> {
        let _scope = self.context.enter()?;
        let mut status = CUstreamCaptureStatus::NONE;
        // SAFETY: 1. the stream exists, by the contract of `new`. 2. The call writes `status`, which
        // outlives it.
        unsafe {
            call!(
                self.library(),
                cuStreamIsCapturing(raw_stream(stream), &raw mut status)
            )
        }?;
        Ok(CaptureStatus::from_raw(status))
    }

    /// Returns the number of the capture that `stream` is part of, the same for all its streams.
    ///
    /// # Errors
    ///
    /// As [`CudaDriver::capture_status`].
    pub(crate) fn capture_id(&self, stream: Stream) -> Result<Option<u64>, DriverError> {
        let _scope = self.context.enter()?;
        let mut status = CUstreamCaptureStatus::NONE;
        let mut id = 0;
        // SAFETY: 1. the stream exists, by the contract of `new`. 2. The call writes `status` and `id`,
        // which outlive it. 3. It writes nothing through the others, which are null.
        unsafe {
            call!(
                self.library(),
                cuStreamGetCaptureInfo_v2(
                    raw_stream(stream),
                    &raw mut status,
                    &raw mut id,
                    ptr::null_mut(),
                    ptr::null_mut(),
                    ptr::null_mut()
                )
            )
        }?;
        let is_active = CaptureStatus::from_raw(status) == CaptureStatus::Active;
        Ok(is_active.then_some(id))
    }

    /// Returns where the next work of `stream` comes in the capture that it is part of, if it is. No other
    /// thread may put work into the stream meanwhile.
    ///
    /// # Errors
    ///
    /// As [`CudaDriver::capture_status`]; [`DriverError::Unsupported`] before CUDA 12.3.
    pub(crate) fn captured_place(
        &self,
        stream: Stream,
    ) -> Result<Option<CapturePoint>, DriverError> {
        let _scope = self.context.enter()?;
        let (mut status, mut capture) = (CUstreamCaptureStatus::NONE, 0);
        let (mut after, mut edges, mut count) = (ptr::null(), ptr::null(), 0);
        // SAFETY: 1. the stream exists, by the contract of `new`. 2. The call writes what the pointers lead
        // to, which outlives it, and nothing through the one that is null.
        unsafe {
            call_optional!(
                self.library(),
                cuStreamGetCaptureInfo_v3(
                    raw_stream(stream),
                    &raw mut status,
                    &raw mut capture,
                    ptr::null_mut(),
                    &raw mut after,
                    &raw mut edges,
                    &raw mut count
                )
            )
        }?;
        let read = |place| {
            // SAFETY: the driver says that so many nodes are there, until the stream's capture goes on, which
            // it does not meanwhile, as the option that asks for this demands of the program.
            let node = unsafe { after.add(place) };
            // SAFETY: as above.
            graph_node(unsafe { *node })
        };
        let after = (0..count).map(read).collect();
        let is_active = CaptureStatus::from_raw(status) == CaptureStatus::Active;
        Ok(is_active.then_some(CapturePoint { capture, after }))
    }

    /// Returns the nodes that a node of a capture under way comes directly after.
    ///
    /// # Errors
    ///
    /// What the driver says; [`DriverError::Unsupported`] before CUDA 12.3.
    pub(crate) fn direct_dependencies(
        &self,
        node: GraphNode,
    ) -> Result<Vec<GraphNode>, DriverError> {
        let _scope = self.context.enter()?;
        let mut room = 16;
        loop {
            let mut nodes = vec![ptr::null_mut(); room];
            let mut edges = vec![CUgraphEdgeData::default(); room];
            let mut count = room;
            // SAFETY: 1. the node is of a capture under way, by the contract of `dependencies`. 2. The call
            // writes at most `count` elements to each of two lists of as many.
            unsafe {
                call_optional!(
                    self.library(),
                    cuGraphNodeGetDependencies_v2(
                        raw_node(node),
                        nodes.as_mut_ptr(),
                        edges.as_mut_ptr(),
                        &raw mut count
                    )
                )
            }?;
            if count < room {
                return Ok(nodes.into_iter().take(count).map(graph_node).collect());
            }
            room *= 4;
        }
    }

    /// Sets every byte of a range, in stream order. Does not wait.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn fill(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
        byte: u8,
        stream: Stream,
    ) -> Result<(), DriverError> {
        let _scope = self.context.enter()?;
        let (size, stream) = (host_size(size), raw_stream(stream));
        // SAFETY: memory and stream are the device's, by the contract of `new`.
        unsafe {
            call!(
                self.library(),
                cuMemsetD8Async(address.get(), byte, size, stream)
            )
        }
    }

    /// Copies from the device to the host, after the work that is now in the default stream, and waits.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn read(&self, address: DeviceAddress, into: &mut [u8]) -> Result<(), DriverError> {
        let _scope = self.context.enter()?;
        let destination = into.as_mut_ptr().cast();
        // SAFETY: 1. `into` has room for the bytes and outlives the call, which waits for the copy.
        // 2. The address is the device's, by the contract of `new`.
        unsafe {
            call!(
                self.library(),
                cuMemcpyDtoH_v2(destination, address.get(), into.len())
            )
        }
    }

    /// Copies from the host to the device, after the work that is now in the default stream; `from` may
    /// be changed again as soon as this returns.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn write(&mut self, address: DeviceAddress, from: &[u8]) -> Result<(), DriverError> {
        let _scope = self.context.enter()?;
        let source = from.as_ptr().cast();
        // SAFETY: 1. `from` has so many bytes, and they are read before the call returns. 2. The address
        // is the device's, by the contract of `new`.
        unsafe {
            call!(
                self.library(),
                cuMemcpyHtoD_v2(address.get(), source, from.len())
            )
        }
    }
}

/// Returns a node of a graph as a number.
fn graph_node(node: CUgraphNode) -> GraphNode {
    GraphNode(node.expose_provenance() as u64)
}

/// Returns the node that a number names.
fn raw_node(node: GraphNode) -> CUgraphNode {
    ptr::with_exposed_provenance_mut(host_size(Bytes(node.0)))
}
