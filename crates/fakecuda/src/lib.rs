//! A stand-in for NVIDIA's `libcuda.so.1` on a machine without a GPU.
//!
//! The shared object exports the driver calls that an allocator and its tests need. Device memory is host memory. A
//! handle is an unnamed file, and mapping it is an `mmap`. So a handle that is mapped twice shows the same bytes at
//! both addresses. Access to an address that is only reserved, or mapped without access rights, faults.
//!
//! Streams run on their own threads, capacity is enforced, and contents are real. There are no kernels. [Host
//! functions] take their place, because the host can use device addresses.
//!
//! `include/fakecuda.h` lists the functions for tests beyond CUDA: set capacities, fail one call, hold a stream,
//! count live objects. Environment variables set the devices, their capacity and failures before `cuInit`.
//!
//! ```text
//! exported function   (context.rs, allocations.rs, virtual_memory.rs, streams.rs, …: one file per noun)
//!   calls::enter      refuses the call after the process's end, counts it, fails it if a test asked for that
//!   state::lock       takes the one lock around all state
//!     State           devices, memory, streams, events, captures (state: one file each)
//! worker thread       (work.rs: one per stream) runs the stream's next task when its dependencies are done
//! ```
//!
//! Error codes are those of NVIDIA's manual. Where the manual leaves a case open, a comment says whether the choice
//! is an H200's (driver 580) or ours.
//!
//! A caller can see these differences to a card:
//!
//! - Fresh memory is zero.
//! - The host can use mapped device memory.
//! - The driver itself uses no memory.
//! - A mapping must lie within one reservation.
//! - Each allocation has its own address range, so a write past its last page faults.
//! - A pool of `cuMemAllocAsync` keeps nothing, and a captured stream cannot allocate.
//! - Graphs cannot be launched.
//! - The host's limit on mappings (`vm.max_map_count`, usually 65,530) applies here too, and is reported as out of
//!   memory.
//!
//! [Host functions]: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__EXEC.html

#![expect(
    unsafe_code,
    reason = "exports a C interface, and maps memory at fixed addresses"
)]

mod access;
mod allocations;
mod attributes;
mod calls;
mod capture;
mod context;
mod control;
mod copies;
mod device;
mod driver;
mod errors;
mod events;
mod host_memory;
mod located;
mod names;
mod os;
mod pointers;
mod process;
mod progress;
mod sharing;
mod state;
mod streams;
mod sys;
mod virtual_memory;
mod work;

pub use located::{Live, library_path};
