//! Tests of [`CudaDriver`](lowtide_cuda::CudaDriver), and of allocators that use it, on a stand-in for NVIDIA's
//! library. The stand-in's device memory is host memory.
//!
//! Not covered: time, kernels, and differences between a card and its manual. `examples/smoke.rs` runs the same
//! steps on a card.
#![expect(unsafe_code, reason = "a driver is opened and given what is its own")]
#![expect(
    clippy::unwrap_used,
    reason = "a step that fails is where the test ends"
)]

#[path = "../common/mod.rs"]
mod common;

mod calls;
mod control;
mod faults;
mod memory_kinds;
