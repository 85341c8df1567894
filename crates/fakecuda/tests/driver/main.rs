//! Tests of the shared object from a caller's view, through the bindings of `cudarc`: others wrote their
//! signatures, layouts and constants.
//!
//! Not covered: a card's behaviour in cases that neither its manual nor a measurement describes.

#![expect(unsafe_code, reason = "every call of CUDA's interface is unsafe")]
#![expect(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block,
    clippy::unwrap_used,
    reason = "tests call a C interface in every line; what makes the calls sound is what they test"
)]

mod capture;
mod context;
mod control;
mod events;
mod memory;
mod process;
mod sharing;
mod streams;
mod support;
mod virtual_memory;
