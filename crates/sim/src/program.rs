//! Programs of operations, and a [`Runner`] that executes them on an allocator over the simulated
//! device and checks the allocator against a model after every one.
//!
//! The same programs serve the property tests, the exhaustive tests, the million-event run and the
//! fuzz targets: [`Op::decode`] makes one of any bytes.
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
//! Not covered: several threads (the allocator is not synchronised), several devices, and what is in
//! the memory, of which the simulated device has none.

mod capture_clocks;
mod checkpoints;
mod checks;
mod configs;
mod decode;
mod ensure;
mod ledger;
mod restore;
mod runner;
mod shadow;

pub use configs::{CAPACITY, configs};
pub use decode::{ENCODED_SIZE, random_program};
use lowtide_core::{Bytes, MempoolId, Stream};
pub use runner::{Effect, Runner};

/// One operation of a program.
///
/// Blocks are named by their place among those that the program holds, modulo their number, so that
/// any operation makes sense anywhere; where the program holds none, nothing is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// Asks for memory.
    Alloc {
        /// How much: zero, and more than there can be, included.
        size: Bytes,
        /// For work in which stream.
        stream: Stream,
        /// From which pool; `None`: wherever the stream is routed.
        pool: Option<MempoolId>,
    },
    /// Lets go of a held block.
    Free {
        /// Which.
        index: u16,
    },
    /// Lets go of an address that is not a held block's: one just inside the block.
    FreeStray {
        /// Of which held block; of none where none is held.
        index: u16,
    },
    /// Says that a stream uses a held block.
    RecordStream {
        /// Which block.
        index: u16,
        /// Which stream.
        stream: Stream,
    },
    /// Queues work on a stream.
    Launch {
        /// Which stream.
        stream: Stream,
        /// How long the work takes, in nanoseconds.
        ns: u64,
    },
    /// Lets time pass on the host.
    Advance {
        /// How much, in nanoseconds.
        ns: u64,
    },
    /// Asks which events have passed.
    ProcessEvents,
    /// Gives back what is not in use.
    EmptyCache,
    /// Routes a stream's requests to a pool.
    BeginPool {
        /// Which pool.
        pool: MempoolId,
        /// Which stream.
        stream: Stream,
    },
    /// Ends the routing to a pool.
    EndPool {
        /// Which pool.
        pool: MempoolId,
    },
    /// Makes a pool, or holds it once more.
    RetainPool {
        /// Which pool.
        pool: MempoolId,
    },
    /// Lets go of a pool.
    ReleasePool {
        /// Which pool.
        pool: MempoolId,
    },
    /// Lets a pool serve others' requests before they fail, or not.
    UseOnOom {
        /// Which pool.
        pool: MempoolId,
        /// Whether it may.
        allow: bool,
    },
    /// Hands a pool's blocks out whole.
    NoSplit {
        /// Which pool.
        pool: MempoolId,
    },
    /// Takes note of what a pool holds, in place of what was noted before.
    Checkpoint {
        /// Which pool.
        pool: MempoolId,
    },
    /// Brings a pool back to what it held when it was last noted.
    Restore {
        /// Which pool.
        pool: MempoolId,
    },
    /// Changes the options of `caching`; the others refuse.
    Reconfigure {
        /// Whether new segments are expandable.
        expandable_segments: bool,
        /// The size from which blocks are not split.
        max_split_size: Option<Bytes>,
    },
    /// Has the work that comes to a stream wait for what is now in another, unless a capture forbids it.
    Wait {
        /// Which stream waits.
        stream: Stream,
        /// Which stream it waits for.
        other: Stream,
    },
    /// Begins a graph capture; captures nest.
    CaptureBegin {
        /// In which stream, if that is not in a capture.
        stream: Stream,
    },
    /// Ends the graph capture that began first.
    CaptureEnd,
    /// Sets or removes the limit on what is held from the driver.
    SetLimit {
        /// The limit.
        limit: Option<Bytes>,
    },
    /// Makes a later driver call fail, once. Replaces a fault that has not struck.
    Fault {
        /// Which call, counted from 1.
        nth: u64,
        /// Whether it fails for lack of memory, or otherwise.
        out_of_memory: bool,
    },
    /// Resets the peaks of the figures.
    ResetPeaks,
    /// Resets the sums of the figures.
    ResetSums,
    /// Takes a snapshot, and checks everything that can be checked.
    Snapshot,
}
