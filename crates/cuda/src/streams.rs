//! Calls on streams: capture status, capture graphs, fills and copies.

use std::ptr;

use lowtide_core::{Bytes, CapturePoint, DeviceAddress, DriverError, GraphNode, Stream};

use crate::driver::{CudaDriver, host_size, raw_stream, stream_handle};
use crate::library::{call, call_optional};
use crate::sys::{CUgraphEdgeData, CUgraphNode, CUresult, CUstreamCaptureStatus};

/// The capture status of a stream, which decides what happens to work that is submitted to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CaptureStatus {
    /// The work runs.
    None,
    /// The work becomes nodes of a graph.
    Active,
    /// The work is refused: a forbidden call invalidated the capture, which has not been ended.
    Invalidated,
}

impl CaptureStatus {
    pub(crate) fn from_raw(raw: CUstreamCaptureStatus) -> CaptureStatus {
        match raw {
            CUstreamCaptureStatus::NONE => CaptureStatus::None,
            CUstreamCaptureStatus::ACTIVE => CaptureStatus::Active,
            // Only `INVALIDATED` is left today. A status of a later driver is not known to mean running or
            // captured.
            _ => CaptureStatus::Invalidated,
        }
    }
}

impl CudaDriver {
    /// Returns the capture status of `stream`.
    ///
    /// # Errors
    ///
    /// The driver's error. The default stream gives an error while another stream is being captured, because work
    /// there would have to wait for the capture. [`DriverError::Unsupported`] for a thread's own default stream.
    pub fn capture_status(&self, stream: Stream) -> Result<CaptureStatus, DriverError> {
        let _scope = self.context.enter()?;
        let known = stream_handle("cuStreamIsCapturing", stream)?;
        let mut status = CUstreamCaptureStatus::NONE;
        // SAFETY: 1. the stream exists, by the contract of `new`. 2. The call writes `status`, which
        // outlives it.
        unsafe { call!(self.library(), cuStreamIsCapturing(known, &raw mut status)) }?;
        Ok(CaptureStatus::from_raw(status))
    }

    /// Returns whether a stream is in a capture, or would wait for one, as the legacy default stream does for those of blocking
    /// streams.
    pub(crate) fn concerns_capture(&self, stream: Stream) -> bool {
        const IMPLICIT: i32 = CUresult::STREAM_CAPTURE_IMPLICIT.0.cast_signed();
        match self.capture_status(stream) {
            Ok(status) => status != CaptureStatus::None,
            Err(DriverError::Failed { code, .. }) => code == IMPLICIT,
            Err(_) => false,
        }
    }

    /// Returns the id of the capture that `stream` is part of, if any. All streams of a capture have the same id.
    ///
    /// # Errors
    ///
    /// As for [`CudaDriver::capture_status`].
    pub(crate) fn capture_id(&self, stream: Stream) -> Result<Option<u64>, DriverError> {
        let _scope = self.context.enter()?;
        let known = stream_handle("cuStreamGetCaptureInfo", stream)?;
        let mut status = CUstreamCaptureStatus::NONE;
        let mut id = 0;
        // SAFETY: 1. the stream exists, by the contract of `new`. 2. The call writes `status` and `id`,
        // which outlive it. 3. It writes nothing through the others, which are null.
        unsafe {
            call!(
                self.library(),
                cuStreamGetCaptureInfo_v2(
                    known,
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

    /// Returns the nodes that the next work of `stream` will depend on in its capture, or `None` if it is not
    /// captured. No other thread may submit work to the stream meanwhile.
    ///
    /// # Errors
    ///
    /// As for [`CudaDriver::capture_status`]; [`DriverError::Unsupported`] before CUDA 12.3.
    pub(crate) fn captured_place(
        &self,
        stream: Stream,
    ) -> Result<Option<CapturePoint>, DriverError> {
        let _scope = self.context.enter()?;
        let known = stream_handle("cuStreamGetCaptureInfo", stream)?;
        let (mut status, mut capture) = (CUstreamCaptureStatus::NONE, 0);
        let (mut after, mut edges, mut count) = (ptr::null(), ptr::null(), 0);
        // SAFETY: 1. the stream exists, by the contract of `new`. 2. The call writes through the pointers to
        // variables that outlive it, and nothing through the null pointer.
        unsafe {
            call_optional!(
                self.library(),
                cuStreamGetCaptureInfo_v3(
                    known,
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
            // SAFETY: the driver returned `count` nodes, valid until the stream's capture goes on. It does not
            // meanwhile: the option that leads here requires that of the program.
            let node = unsafe { after.add(place) };
            // SAFETY: as above.
            graph_node(unsafe { *node })
        };
        let after = (0..count).map(read).collect();
        let is_active = CaptureStatus::from_raw(status) == CaptureStatus::Active;
        Ok(is_active.then_some(CapturePoint { capture, after }))
    }

    /// Returns the direct dependencies of a node of a capture in progress.
    ///
    /// # Errors
    ///
    /// The driver's error; [`DriverError::Unsupported`] before CUDA 12.3.
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
            // SAFETY: 1. the node is of a capture in progress, by the contract of `dependencies`. 2. The call
            // writes at most `count` elements to each of two lists of that length.
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
    /// The driver's error.
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

    /// Copies from the device to the host after the work submitted to the default stream so far, and waits.
    ///
    /// # Errors
    ///
    /// The driver's error.
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

    /// Copies from the host to the device after the work submitted to the default stream so far. `from` may be
    /// modified as soon as this returns.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn write(&mut self, address: DeviceAddress, from: &[u8]) -> Result<(), DriverError> {
        let _scope = self.context.enter()?;
        let source = from.as_ptr().cast();
        // SAFETY: 1. `from` has `from.len()` bytes, and they are read before the call returns. 2. The address is
        // the device's, by the contract of `new`.
        unsafe {
            call!(
                self.library(),
                cuMemcpyHtoD_v2(address.get(), source, from.len())
            )
        }
    }
}

/// Returns a graph node's number.
fn graph_node(node: CUgraphNode) -> GraphNode {
    GraphNode(node.expose_provenance() as u64)
}

/// Returns the graph node with this number.
fn raw_node(node: GraphNode) -> CUgraphNode {
    ptr::with_exposed_provenance_mut(host_size(Bytes(node.0)))
}
