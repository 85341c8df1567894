//! Serves programs that do not know lowtide, through `LD_PRELOAD`.
//!
//! The library replaces the driver's functions that allocate and free memory. It does so only in a process that
//! was started with it in `LD_PRELOAD` and with `LOWTIDE_PRELOAD` set, as `lowtide run --preload` does. Otherwise
//! each function only passes its call on.
//!
//! # How a program's call gets here
//!
//! ```text
//! program ─ cudaMalloc ─ CUDA's runtime ─┐     the runtime looks every function of the driver up
//! program ─ dlsym, cuGetProcAddress ─────┤     lookup.rs: returns our function
//! program ─ cuMemAlloc, linked ──────────┤     the loader finds ours first
//!                                        └ stand_ins.rs ─ memory.rs ─ devices.rs
//!                                                       └ the driver's function, for everything else
//! ```
//!
//! CUDA's runtime is not changed, whether it is linked statically or not. It still creates contexts, chooses
//! devices and keeps `cudaGetLastError`. It calls the driver for memory through functions that it finds with
//! `cuGetProcAddress`, which it finds with `dlsym` (both kinds of CUDA 12.9's runtime do). So one set of
//! functions serves both of CUDA's interfaces.
//!
//! # Guarantees
//!
//! - Memory from `cudaMalloc` may be used in any stream at once, and `cudaFree` waits for the device's work, as
//!   CUDA's does. Memory from `cudaMallocAsync` is reused in the order of its stream, and in other streams only
//!   after an event.
//! - If lowtide cannot serve a request, the driver does, so the error codes are CUDA's own. The driver also
//!   serves everything in a context that is not its device's primary one, everything after a primary context was
//!   reset, and memory that lowtide did not allocate. A pointer of lowtide's is never passed to the driver's
//!   `cuMemFree`.
//! - `cudaMemGetInfo` counts lowtide's cached memory as free. If the driver runs out of memory for something else
//!   (arrays, managed memory, `cuMemCreate`, loaded code, graphs), cached memory is released and the driver is
//!   called again. Kernel launches are not intercepted: no cached memory is released for a kernel's stack.
//!
//! # Differences that a program can see
//!
//! One allocation of the driver's holds several of the program's. `cuMemGetAddressRange` and pointer attributes
//! describe the driver's allocation, because libraries that share memory between processes need that.
//! `cudaIpcGetMemHandle` refuses an allocation that is not at its start (`cudaErrorNotSupported`), because the
//! other process would map the start. Statistics and limits of the driver's own pools do not include lowtide's
//! memory. `cudaMalloc` works during a graph capture.
//!
//! A free range between allocated blocks serves only requests up to its size, though `cudaMemGetInfo` counts it.
//! If most memory is fragmented in this way, the program runs out of memory sooner. Memory that was freed in
//! stream order is kept for that stream until memory runs out, even after the stream, or the thread of a
//! per-thread default stream, has ended. With many such streams the program may come to hold all memory of the
//! device, which other processes see.

mod code;
mod lookup;
mod memory;
mod mode;
mod order;
mod serving;
mod stand_ins;
mod start;
mod summary;

pub use lookup::dlsym;
pub use stand_ins::*;
