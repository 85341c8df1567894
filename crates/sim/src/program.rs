//! Programs of operations. A [`Runner`] executes them with an allocator on the simulated device, and checks the
//! allocator against a model after each operation.
//!
//! The property tests, the exhaustive tests, the million-event run and the fuzz targets use the same programs:
//! [`Op::decode`] makes an operation of any bytes.
//!
//! ```
//! use lowtide_core::{Bytes, Stream};
//! use lowtide_sim::program::{Op, Runner};
//!
//! let program = [
//!     Op::Alloc { size: Bytes::mib(3), stream: Stream::DEFAULT, pool: None },
//!     Op::RecordStream { index: 0, stream: Stream(1) },
//!     Op::Free { index: 0 },
//! ];
//! Runner::run(&"caching".parse().unwrap(), Bytes::gib(1), &program).unwrap();
//! ```
//!
//! Not covered: several threads (the allocator is not synchronised), several devices, and the contents of memory,
//! which the simulated device does not have.

mod capture_clocks;
mod checkpoints;
mod checks;
mod configs;
mod decode;
mod ensure;
mod ledger;
mod order;
mod places;
mod pools;
mod restore;
mod runner;
mod shadow;

pub use configs::{CAPACITY, configs};
pub use decode::{ENCODED_SIZE, random_program};
use lowtide_core::{Bytes, MempoolId, Stream};
pub use runner::{Effect, Runner};

/// One operation of a program.
///
/// An index names an allocated block of the program, modulo the number of blocks, so every operation is valid
/// anywhere. If no block is allocated, the operation does nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// Allocates memory.
    Alloc {
        /// The size, which may be zero or impossibly large.
        size: Bytes,
        /// The stream of the block.
        stream: Stream,
        /// The pool; `None` for the pool that the stream is routed to.
        pool: Option<MempoolId>,
    },
    /// Allocates memory behind a block, if that is free.
    AllocBehind {
        /// The block.
        index: u16,
        /// The free bytes to leave between them, in units of 512.
        gap: u8,
        /// The size.
        size: Bytes,
        /// The stream of the new block.
        stream: Stream,
    },
    /// Frees a block.
    Free {
        /// The block.
        index: u16,
    },
    /// Frees an address that is not a block's: one byte after the block's start.
    FreeStray {
        /// The block; if no block is allocated, an unused address is freed.
        index: u16,
    },
    /// Calls `record_stream` for a block.
    RecordStream {
        /// The block.
        index: u16,
        /// The stream.
        stream: Stream,
    },
    /// Queues work on a stream.
    Launch {
        /// The stream.
        stream: Stream,
        /// The duration of the work, in nanoseconds.
        ns: u64,
    },
    /// Advances the host's clock.
    Advance {
        /// The time, in nanoseconds.
        ns: u64,
    },
    /// Queries which events have passed.
    ProcessEvents,
    /// Releases the memory that is not in use.
    EmptyCache,
    /// Releases memory that no work uses.
    ReleaseUnused {
        /// Whether only what was idle at the last such operation is released.
        is_old: bool,
        /// How much, at most.
        most: Bytes,
    },
    /// Releases as much idle memory as is missing for new memory.
    ReleaseIdle {
        /// The size of the new memory.
        size: Bytes,
    },
    /// Routes a stream's requests to a pool.
    BeginPool {
        /// The pool.
        pool: MempoolId,
        /// The stream.
        stream: Stream,
    },
    /// Ends the routing to a pool.
    EndPool {
        /// The pool.
        pool: MempoolId,
    },
    /// Creates a pool, or increments its use count.
    RetainPool {
        /// The pool.
        pool: MempoolId,
    },
    /// Decrements a pool's use count.
    ReleasePool {
        /// The pool.
        pool: MempoolId,
    },
    /// Sets whether a pool may serve other requests before they fail.
    UseOnOom {
        /// The pool.
        pool: MempoolId,
        /// Whether it may.
        allow: bool,
    },
    /// Makes a pool return its blocks without splitting them.
    NoSplit {
        /// The pool.
        pool: MempoolId,
    },
    /// Checkpoints a pool. Replaces its earlier checkpoint.
    Checkpoint {
        /// The pool.
        pool: MempoolId,
    },
    /// Restores a pool to its last checkpoint.
    Restore {
        /// The pool.
        pool: MempoolId,
    },
    /// Changes the options of `caching`. Other strategies refuse.
    Reconfigure {
        /// Whether new segments are expandable.
        expandable_segments: bool,
        /// The size from which blocks are not split.
        max_split_size: Option<Bytes>,
    },
    /// Makes later work of a stream wait for the current work of another, unless a capture forbids it.
    Wait {
        /// The stream that waits.
        stream: Stream,
        /// The stream that it waits for.
        other: Stream,
    },
    /// Begins a graph capture; captures nest.
    CaptureBegin {
        /// The stream to capture, unless it is in a capture.
        stream: Stream,
    },
    /// Ends the graph capture that began first.
    CaptureEnd,
    /// Sets or removes the limit on reserved memory.
    SetLimit {
        /// The limit.
        limit: Option<Bytes>,
    },
    /// Makes a later driver call fail, once. Replaces a fault that has not happened.
    Fault {
        /// The number of the call, counted from 1.
        nth: u64,
        /// Whether the error is out of memory, or another.
        out_of_memory: bool,
    },
    /// Resets the peaks of the statistics.
    ResetPeaks,
    /// Resets the accumulated statistics.
    ResetSums,
    /// Takes a snapshot and runs every check.
    Snapshot,
}
