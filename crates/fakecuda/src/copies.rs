//! Copies and fills, both in stream order and synchronous.

use std::ffi::{c_uchar, c_uint};

use crate::calls::{Outcome, driver_calls};
use crate::capture;
use crate::os;
use crate::state::stream::{Source, Work};
use crate::state::{Guard, State, lock};
use crate::sys::*;
use crate::work;

driver_calls! {
    fn cuMemcpy(destination: CUdeviceptr, source: CUdeviceptr, bytes: usize) {
        copy_now(Copy::new(destination, source, bytes, None))
    }

    fn cuMemcpyHtoD_v2(destination: CUdeviceptr, source: u64, bytes: usize) {
        copy_now(Copy::new(destination, source, bytes, Some(destination)))
    }

    fn cuMemcpyDtoH_v2(destination: u64, source: CUdeviceptr, bytes: usize) {
        copy_now(Copy::new(destination, source, bytes, Some(source)))
    }

    fn cuMemcpyAsync(
        destination: CUdeviceptr,
        source: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) {
        copy_in(Copy::new(destination, source, bytes, None), stream)
    }

    fn cuMemcpyHtoDAsync_v2(
        destination: CUdeviceptr,
        source: u64,
        bytes: usize,
        stream: CUstream,
    ) {
        copy_in(Copy::new(destination, source, bytes, Some(destination)), stream)
    }

    fn cuMemcpyDtoHAsync_v2(
        destination: u64,
        source: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) {
        copy_in(Copy::new(destination, source, bytes, Some(source)), stream)
    }

    fn cuMemsetD8_v2(destination: CUdeviceptr, value: c_uchar, bytes: usize) {
        let state = lock()?;
        state.current()?;
        // The manual: asynchronous except for pinned host memory. So the fill is only queued. As on an H200 with
        // driver 580, captures do not forbid it.
        fill_in(state, destination, repeated(value), bytes, CU_STREAM_LEGACY)
    }

    fn cuMemsetD8Async(
        destination: CUdeviceptr,
        value: c_uchar,
        bytes: usize,
        stream: CUstream,
    ) {
        fill_in(lock()?, destination, repeated(value), bytes, stream)
    }

    fn cuMemsetD32Async(
        destination: CUdeviceptr,
        value: c_uint,
        count: usize,
        stream: CUstream,
    ) {
        fill_words_in(stream, destination, value, count)
    }

    fn cuStreamWriteValue32_v2(
        stream: CUstream,
        address: CUdeviceptr,
        value: c_uint,
        _flags: c_uint,
    ) {
        fill_words_in(stream, address, value, 1)
    }

    // Programs built for older drivers use this name.
    fn cuStreamWriteValue32(
        stream: CUstream,
        address: CUdeviceptr,
        value: c_uint,
        _flags: c_uint,
    ) {
        fill_words_in(stream, address, value, 1)
    }
}

/// Returns a word of four equal bytes.
fn repeated(value: c_uchar) -> c_uint {
    c_uint::from_ne_bytes([value; 4])
}

/// A copy as requested by a program.
struct Copy {
    destination: u64,
    source: u64,
    bytes: u64,
    /// The end that must be device memory, if the call's name says so.
    on_device: Option<u64>,
}

impl Copy {
    fn new(destination: u64, source: u64, bytes: usize, on_device: Option<u64>) -> Self {
        Self {
            destination,
            source,
            bytes: bytes as u64,
            on_device,
        }
    }

    /// Submits the copy to a stream. `source` is where the bytes are now.
    fn submit(&self, state: &mut State, stream: CUstream, source: Source) -> Outcome {
        let destination = state.place(self.destination);
        state.submit(
            stream,
            Work::Copy {
                destination,
                source,
                bytes: self.bytes,
            },
        )
    }

    /// Fails if a part of the range that must be device memory is not mapped. Missing access rights are found when
    /// the work runs, as on a card.
    fn check(&self, state: &State) -> Outcome {
        let is_mapped = |address| state.memory.covers(address, self.bytes, |_| true);
        if self.on_device.is_none_or(is_mapped) {
            Ok(())
        } else {
            Err(CUresult::INVALID_VALUE)
        }
    }
}

/// Copies in the legacy stream and waits. On a card, a copy within one device may return earlier, but no program
/// can rely on that.
fn copy_now(copy: Copy) -> Outcome {
    let (mut state, _) = capture::lock_for_unsafe_call()?;
    copy.check(&state)?;
    let name = state.stream_named(CU_STREAM_LEGACY)?;
    if copy.bytes == 0 {
        return Ok(());
    }
    let source = Source::Place(state.place(copy.source));
    copy.submit(&mut state, name, source)?;
    wait_for_stream(state, name)
}

/// Copies in stream order. As the manual's section on synchronization says, a pageable source is read at once, and
/// a copy to a pageable destination is waited for.
fn copy_in(copy: Copy, stream: CUstream) -> Outcome {
    let mut state = lock()?;
    let name = state.stream_named(stream)?;
    copy.check(&state)?;
    if copy.bytes == 0 {
        return Ok(());
    }
    let is_captured = state.streams[&name].capture.is_some();
    let source = if state.is_pageable(copy.source) && !is_captured {
        Source::Staged(os::read(copy.source, copy.bytes))
    } else {
        Source::Place(state.place(copy.source))
    };
    let is_pageable = state.is_pageable(copy.destination);
    copy.submit(&mut state, name, source)?;
    if is_pageable && !is_captured {
        return wait_for_stream(state, name);
    }
    Ok(())
}

fn fill_in(
    mut state: Guard,
    destination: u64,
    value: c_uint,
    bytes: usize,
    stream: CUstream,
) -> Outcome {
    let name = state.stream_named(stream)?;
    let bytes = bytes as u64;
    if bytes == 0 {
        return Ok(());
    }
    // Pinned host memory can be filled as well.
    if state.is_pageable(destination) {
        return Err(CUresult::INVALID_VALUE);
    }
    let destination = state.place(destination);
    state.submit(
        name,
        Work::Fill {
            destination,
            value,
            bytes,
        },
    )
}

fn fill_words_in(stream: CUstream, address: u64, value: c_uint, count: usize) -> Outcome {
    let is_aligned = address.is_multiple_of(size_of::<c_uint>() as u64);
    let bytes = count.checked_mul(size_of::<c_uint>());
    let bytes = bytes
        .filter(|_| is_aligned)
        .ok_or(CUresult::INVALID_VALUE)?;
    fill_in(lock()?, address, value, bytes, stream)
}

fn wait_for_stream(state: Guard, name: CUstream) -> Outcome {
    let stream = &state.streams[&name];
    let (device, tail) = (stream.device, stream.queue.tail());
    work::wait_for(state, &[tail])?.check_fault(device)
}

impl State {
    /// Returns whether an address is host memory that is neither pinned nor managed.
    fn is_pageable(&self, address: u64) -> bool {
        self.memory.reservation_at(address).is_none() && self.memory.host_at(address).is_none()
    }
}
