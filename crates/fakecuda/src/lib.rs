//! A stand-in for NVIDIA's `libcuda.so.1` on a machine without a GPU.
//!
//! The shared object exports the driver calls that an allocator and its tests need. Device memory is
//! host memory: a handle is a file without a name, mapping it is `mmap`, so a handle that is mapped
//! twice shows the same bytes twice, and an address that is reserved only, or mapped without access,
//! faults. Streams run on threads of their own, capacity counts, and contents are real. There are no
//! kernels; [host functions] take their place, as a device address can be used on the host.
//!
//! `include/fakecuda.h` lists what a test can ask for beyond CUDA: capacities, the failure of one
//! call, a stream that is held, what is still alive. The environment sets the same before `cuInit`.
//!
//! ```text
//! exported function   (context.rs, allocations.rs, virtual_memory.rs, streams.rs, …: a file a noun)
//!   calls::enter      refuses the call after the end, counts it, fails it if a test asked for that
//!   state::lock       the one lock around all state
//!     State           devices, memory, streams, events, captures (state: a file each)
//! worker thread       (work.rs: one a stream) takes the stream's next task when what it waits for is done
//! ```
//!
//! Error codes are those of NVIDIA's manual. Where it leaves a case open, a comment says whether an
//! H200 with driver 580 answers so or the choice is ours.
//!
//! Differences to a card that a caller can see: fresh memory is zero; the host can use device memory
//! that is mapped; the driver takes no memory itself; a mapping must lie within one reservation; each
//! allocation has addresses of its own, so that what writes past its last page faults; a pool of
//! `cuMemAllocAsync` keeps nothing, and a captured stream cannot allocate; graphs cannot be launched.
//! The host's limit on mappings (`vm.max_map_count`, usually 65,530) holds here too, and is reported
//! as a lack of memory.
//!
//! [host functions]: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__EXEC.html

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
