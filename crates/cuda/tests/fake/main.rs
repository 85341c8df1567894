//! [`CudaDriver`](lowtide_cuda::CudaDriver) and allocators on it, over a stand-in for NVIDIA's library
//! whose memory is the host's.
//!
//! Not covered: time, kernels, and whatever a card does differently from its manual;
//! `examples/smoke.rs` takes the same steps on one.
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
