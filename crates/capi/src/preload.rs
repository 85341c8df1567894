//! `liblowtide.so` in front of a program that knows nothing of it, by `LD_PRELOAD`.
//!
//! The library stands in for the functions of NVIDIA's driver that allocate and free. It does so only in a
//! process that was started with it in `LD_PRELOAD` and with `LOWTIDE_PRELOAD` set, as `lowtide run --preload`
//! does; loaded in any other way, each function passes its call on and does nothing else.
//!
//! # How a program's call gets here
//!
//! ```text
//! program ─ cudaMalloc ─ CUDA's runtime ─┐     the runtime looks every function of the driver up
//! program ─ dlsym, cuGetProcAddress ─────┤     lookup.rs: the answer is ours
//! program ─ cuMemAlloc, linked ──────────┤     the loader finds ours first
//!                                        └ stand_ins.rs ─ memory.rs ─ devices.rs
//!                                                       └ the driver's own, for all that is not ours
//! ```
//!
//! CUDA's runtime, linked statically or not, is left as it is: it makes contexts, chooses devices and keeps
//! `cudaGetLastError` as ever, and asks the driver for memory by functions that it looks up with
//! `cuGetProcAddress`, which it looks up with `dlsym` (seen in CUDA 12.9's, both kinds). So one set of
//! functions serves both of CUDA's interfaces.
//!
//! # What is promised
//!
//! - Memory from `cudaMalloc` may be used in any stream at once, and `cudaFree` waits for the device's work,
//!   as CUDA's does. Memory from `cudaMallocAsync` is reused in the order of its stream, and in others only
//!   after an event.
//! - A request that lowtide cannot serve is the driver's to answer: its codes are CUDA's own. So is
//!   everything in a context that is not its device's primary one, after a primary context was reset, and
//!   memory that lowtide did not allocate. A pointer of lowtide's never gets to the driver's `cuMemFree`.
//! - `cudaMemGetInfo` counts what lowtide keeps for later as free. Where the driver runs out of memory for
//!   something else (arrays, managed memory, `cuMemCreate`, code that is loaded, graphs), what is kept goes back,
//!   and it is asked again. Launches are not looked at: what a kernel's stack takes is not given back for.
//!
//! # What a program can see
//!
//! Several allocations lie in one of the driver's. `cuMemGetAddressRange` and the attributes of a pointer tell
//! of that one, as libraries need it that share memory with other processes; `cudaIpcGetMemHandle` refuses
//! an allocation that does not begin it (`cudaErrorNotSupported`), because the other process would map its
//! beginning. Statistics and limits of the driver's own pools know nothing of lowtide's memory. `cudaMalloc`
//! works during a graph capture.
//!
//! What is free between blocks that are held serves requests up to its own size only, though `cudaMemGetInfo` counts
//! it: a program that leaves such gaps in most of the memory runs out of it sooner. What was freed in the order of a
//! stream is kept for that stream until memory runs out, also once the stream has ended, or the thread whose default
//! stream it was: with many of those a program comes to hold all of the card, which other processes see.

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
pub(crate) use order::is_of_thread;
pub use stand_ins::*;
