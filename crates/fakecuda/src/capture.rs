//! Captures: streams that record their work instead of running it, and the calls that are forbidden meanwhile.
//!
//! Graphs are never launched, so a capture keeps only the dependencies of its nodes. They decide every error.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::{mem, ptr};

use crate::calls::{Outcome, driver_calls};
use crate::names::{new_name, this_thread};
use crate::pointers::Out;
use crate::state::capture::{Capture, Position};
use crate::state::{Guard, State, lock};
use crate::sys::*;

/// The data of an edge between two nodes. It is always zero.
type EdgeData = [u8; 8];

thread_local! {
    static THREAD_MODE: Cell<c_uint> = const { Cell::new(CU_STREAM_CAPTURE_MODE_GLOBAL) };
}

driver_calls! {
    fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint) {
        let mut state = lock()?;
        let name = state.stream_named(stream)?;
        if mode > CU_STREAM_CAPTURE_MODE_RELAXED {
            return Err(CUresult::INVALID_VALUE);
        }
        let device = state.streams[&name].device;
        if state.legacy_stream_of(device) == Some(name) {
            return Err(CUresult::STREAM_CAPTURE_UNSUPPORTED);
        }
        if state.streams[&name].capture.is_some() {
            return Err(CUresult::ILLEGAL_STATE);
        }
        let number = new_name();
        state.stream_mut(name).capture = Some(number);
        let capture = Capture {
            origin: name,
            mode,
            thread: this_thread(),
            is_valid: true,
            graph: new_name(),
            frontiers: BTreeMap::from([(name, Vec::new())]),
            nodes: BTreeMap::new(),
        };
        state.captures.insert(number, capture);
        Ok(())
    }

    fn cuStreamEndCapture(stream: CUstream, graph: Out<CUgraph>) {
        let out = graph.required()?;
        let mut state = lock()?;
        let name = state.stream_named(stream)?;
        let number = state.streams[&name].capture.ok_or(CUresult::ILLEGAL_STATE)?;
        let capture = &state.captures[&number];
        if capture.origin != name {
            return Err(CUresult::STREAM_CAPTURE_UNMATCHED);
        }
        // The manual allows another thread to end a capture only in relaxed mode.
        let is_ours = capture.thread == this_thread();
        if !is_ours && capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED {
            return Err(CUresult::STREAM_CAPTURE_WRONG_THREAD);
        }
        let (outcome, graph) = (capture.outcome(), capture.graph);
        state.forget_capture(number);
        if let Err(code) = outcome {
            out.set(0);
            return Err(code);
        }
        state.graphs.insert(graph);
        out.set(graph);
        Ok(())
    }

    fn cuGraphDestroy(graph: CUgraph) {
        let was_there = lock()?.graphs.remove(&graph);
        was_there.then_some(()).ok_or(CUresult::INVALID_VALUE)
    }

    fn cuStreamIsCapturing(stream: CUstream, status: Out<c_uint>) {
        capture_info(stream, status, Out::NULL, Out::NULL, Out::NULL, Out::NULL)
    }

    fn cuStreamGetCaptureInfo_v2(
        stream: CUstream,
        status: Out<c_uint>,
        number: Out<u64>,
        graph: Out<CUgraph>,
        dependencies: Out<*const CUgraphNode>,
        dependency_count: Out<usize>,
    ) {
        capture_info(stream, status, number, graph, dependencies, dependency_count)
    }

    fn cuStreamGetCaptureInfo_v3(
        stream: CUstream,
        status: Out<c_uint>,
        number: Out<u64>,
        graph: Out<CUgraph>,
        dependencies: Out<*const CUgraphNode>,
        edges: Out<*const EdgeData>,
        dependency_count: Out<usize>,
    ) {
        capture_info(stream, status, number, graph, dependencies, dependency_count)?;
        edges.set_if_wanted(ptr::null());
        Ok(())
    }

    fn cuGraphNodeGetDependencies(
        node: CUgraphNode,
        dependencies: Out<CUgraphNode>,
        count: Out<usize>,
    ) {
        dependencies_of(node, dependencies, count).map(drop)
    }

    fn cuGraphNodeGetDependencies_v2(
        node: CUgraphNode,
        dependencies: Out<CUgraphNode>,
        edges: Out<EdgeData>,
        count: Out<usize>,
    ) {
        let written = dependencies_of(node, dependencies, count)?;
        if let Ok(edges) = edges.required() {
            edges.set_all(&vec![EdgeData::default(); written]);
        }
        Ok(())
    }

    fn cuThreadExchangeStreamCaptureMode(mode: Out<c_uint>) {
        let slot = mode.required()?;
        drop(lock()?);
        let wanted = slot.get();
        if wanted > CU_STREAM_CAPTURE_MODE_RELAXED {
            return Err(CUresult::INVALID_VALUE);
        }
        slot.set(THREAD_MODE.replace(wanted));
        Ok(())
    }
}

/// Writes a stream's capture status, its capture, and its dependencies in the capture.
fn capture_info(
    stream: CUstream,
    status: Out<c_uint>,
    number: Out<u64>,
    graph: Out<CUgraph>,
    dependencies: Out<*const CUgraphNode>,
    dependency_count: Out<usize>,
) -> Outcome {
    let out = status.required()?;
    let mut state = lock()?;
    let name = state.stream_named(stream)?;
    // The manual: querying the legacy stream while a blocking stream captures is an error that leaves the capture
    // valid.
    if !state.implicitly_awaited(name).is_empty() {
        return Err(CUresult::STREAM_CAPTURE_IMPLICIT);
    }
    out.set(state.capture_status(name));
    if let Some(capture) = state.streams[&name].capture {
        let after = &state.captures[&capture].frontiers[&name];
        number.set_if_wanted(capture);
        graph.set_if_wanted(state.captures[&capture].graph);
        // The manual: the list is valid until the stream's capture continues.
        dependencies.set_if_wanted(after.as_ptr());
        dependency_count.set_if_wanted(after.len());
    }
    Ok(())
}

/// Writes the direct dependencies of a node of a capture in progress, as many as fit. Without a list, writes only
/// their number. Returns how many were written to the list.
fn dependencies_of(
    node: CUgraphNode,
    dependencies: Out<CUgraphNode>,
    count: Out<usize>,
) -> Result<usize, CUresult> {
    let count = count.required()?;
    let state = lock()?;
    let mut captures = state.captures.values();
    let found = captures.find_map(|capture| capture.nodes.get(&node));
    let found = found.ok_or(CUresult::INVALID_VALUE)?;
    let Ok(dependencies) = dependencies.required() else {
        count.set(found.len());
        return Ok(0);
    };
    let written = &found[..found.len().min(count.get())];
    dependencies.set_all(written);
    count.set(written.len());
    Ok(written.len())
}

impl State {
    fn capture_status(&self, stream: CUstream) -> c_uint {
        match self.streams[&stream].capture {
            None => CU_STREAM_CAPTURE_STATUS_NONE,
            Some(number) if self.captures[&number].is_valid => CU_STREAM_CAPTURE_STATUS_ACTIVE,
            Some(_) => CU_STREAM_CAPTURE_STATUS_INVALIDATED,
        }
    }

    /// Ends a capture, valid or not: its streams run their work again.
    fn forget_capture(&mut self, number: u64) {
        self.captures.remove(&number);
        for stream in self.streams.values_mut() {
            if stream.capture == Some(number) {
                stream.capture = None;
            }
        }
    }

    /// Returns the captures in blocking streams that the legacy stream would wait for.
    fn implicitly_awaited(&self, stream: CUstream) -> Vec<u64> {
        let device = self.streams[&stream].device;
        if self.legacy_stream_of(device) != Some(stream) {
            return Vec::new();
        }
        let streams = self.streams.values();
        let blocking = streams.filter(|other| other.device == device && other.is_blocking);
        blocking.filter_map(|other| other.capture).collect()
    }
}

/// Adds a node to a stream's capture. Returns false if the stream is not captured.
///
/// # Errors
///
/// `STREAM_CAPTURE_INVALIDATED` if the capture is invalid.
pub(crate) fn remember(state: &mut State, stream: CUstream) -> Result<bool, CUresult> {
    let Some(number) = state.streams[&stream].capture else {
        return Ok(false);
    };
    let capture = state
        .captures
        .get_mut(&number)
        .expect("the stream is in it");
    if !capture.is_valid {
        return Err(CUresult::STREAM_CAPTURE_INVALIDATED);
    }
    let node = new_name();
    let frontier = capture.frontiers.entry(stream).or_default();
    let after = mem::replace(frontier, vec![node]);
    capture.nodes.insert(node, after);
    Ok(true)
}

/// Returns the dependencies of a stream's next work in its capture, or `None` if it is not captured.
pub(crate) fn position(state: &State, stream: CUstream) -> Option<Position> {
    let capture = state.streams[&stream].capture?;
    let after = state.captures[&capture].frontiers.get(&stream)?.clone();
    Some(Position { capture, after })
}

/// Like [`position`], but fails if the capture is invalid.
///
/// # Errors
///
/// `STREAM_CAPTURE_INVALIDATED` if the capture is invalid.
pub(crate) fn valid_position(
    state: &State,
    stream: CUstream,
) -> Result<Option<Position>, CUresult> {
    let position = position(state, stream);
    match &position {
        Some(position) if !state.captures[&position.capture].is_valid => {
            Err(CUresult::STREAM_CAPTURE_INVALIDATED)
        }
        _ => Ok(position),
    }
}

/// Makes a stream's next work depend on a position in a capture, and adds the stream to the capture.
///
/// # Errors
///
/// `STREAM_CAPTURE_MERGE` if the stream is in another capture, `STREAM_CAPTURE_INVALIDATED` if this one is invalid.
/// `CAPTURED_EVENT` if this one has ended: the manual says only that the stream would then wait for work that never
/// runs.
pub(crate) fn join(state: &mut State, stream: CUstream, position: &Position) -> Outcome {
    refuse_implicit_wait(state, stream)?;
    let Some(capture) = state.captures.get_mut(&position.capture) else {
        return Err(CUresult::CAPTURED_EVENT);
    };
    if !capture.is_valid {
        return Err(CUresult::STREAM_CAPTURE_INVALIDATED);
    }
    match state.streams[&stream].capture {
        Some(other) if other != position.capture => {
            invalidate(state, other);
            invalidate(state, position.capture);
            return Err(CUresult::STREAM_CAPTURE_MERGE);
        }
        _ => {}
    }
    let frontier = capture.frontiers.entry(stream).or_default();
    for node in &position.after {
        if !frontier.contains(node) {
            frontier.push(*node);
        }
    }
    state.stream_mut(stream).capture = Some(position.capture);
    Ok(())
}

/// Invalidates a capture if it is still in progress, so that ending it fails.
pub(crate) fn invalidate(state: &mut State, number: u64) {
    if let Some(capture) = state.captures.get_mut(&number) {
        capture.is_valid = false;
    }
}

/// Like [`invalidate`], for the capture that a stream is part of.
pub(crate) fn invalidate_of(state: &mut State, stream: CUstream) {
    if let Some(number) = state.streams[&stream].capture {
        invalidate(state, number);
    }
}

/// Handles the destruction of a captured stream: invalidates its capture, and ends it if the stream is its origin.
pub(crate) fn lose_stream(state: &mut State, stream: CUstream) {
    invalidate_of(state, stream);
    let number = state.streams[&stream].capture;
    if let Some(number) = number.filter(|number| state.captures[number].origin == stream) {
        state.forget_capture(number);
    }
}

/// Refuses a call that is forbidden on a captured stream, such as waiting for it, and invalidates its capture.
pub(crate) fn refuse_in_capture(state: &mut State, stream: CUstream) -> Outcome {
    if state.streams[&stream].capture.is_none() {
        return Ok(());
    }
    invalidate_of(state, stream);
    Err(CUresult::STREAM_CAPTURE_UNSUPPORTED)
}

/// Refuses a wait for the whole device while one of its streams is captured, and invalidates those captures.
pub(crate) fn refuse_if_device_captures(state: &mut State, device: usize) -> Outcome {
    let streams = state.streams.values();
    let own = streams.filter(|stream| stream.device == device);
    let captures = own.filter_map(|stream| stream.capture).collect();
    refuse_for(state, captures, CUresult::STREAM_CAPTURE_UNSUPPORTED)
}

/// Refuses work in the legacy stream while a blocking stream is captured, and invalidates that capture.
pub(crate) fn refuse_implicit_wait(state: &mut State, stream: CUstream) -> Outcome {
    let captures = state.implicitly_awaited(stream);
    refuse_for(state, captures, CUresult::STREAM_CAPTURE_IMPLICIT)
}

/// Fails with `code` if there are such captures, and invalidates them.
fn refuse_for(state: &mut State, captures: Vec<u64>, code: CUresult) -> Outcome {
    let is_allowed = captures.is_empty();
    for number in captures {
        invalidate(state, number);
    }
    if is_allowed { Ok(()) } else { Err(code) }
}

/// Locks the state for a call in the current context that the manual calls potentially unsafe. Returns the state, and
/// the context's device.
///
/// # Errors
///
/// Those of [`State::current`] and of [`refuse_unsafe_call`].
pub(crate) fn lock_for_unsafe_call() -> Result<(Guard, usize), CUresult> {
    let mut state = lock()?;
    let (device, _) = state.current()?;
    refuse_unsafe_call(&mut state)?;
    Ok((state, device))
}

/// Refuses a call that the manual calls potentially unsafe, if this thread's mode and a capture in progress forbid
/// it. Invalidates the captures that forbid it.
///
/// The manual names only cuMemAlloc and cuEventQuery as examples. Here the unsafe calls are: those that allocate,
/// free or pin memory; those that query or wait for any event or stream; and copies that wait. An H200 with driver
/// 580 refuses those that were tried. Copies, registered and managed memory were not tried.
pub(crate) fn refuse_unsafe_call(state: &mut State) -> Outcome {
    let mode = THREAD_MODE.get();
    if mode == CU_STREAM_CAPTURE_MODE_RELAXED {
        return Ok(());
    }
    let mut is_forbidden = false;
    for capture in state.captures.values_mut() {
        let forbids = if capture.thread == this_thread() {
            capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED
        } else {
            mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL
        };
        if forbids {
            capture.is_valid = false;
            is_forbidden = true;
        }
    }
    if is_forbidden {
        Err(CUresult::STREAM_CAPTURE_UNSUPPORTED)
    } else {
        Ok(())
    }
}
