//! The limit of the memory that a file may take, and the memory taken so far.
//!
//! Only memory that is really touched counts: small allocations with the allocator's overhead, and large ones as
//! far as they are filled.

use lowtide_core::Bytes;

use crate::error::{ErrorKind, Result, TraceError};

/// The limit of a file of any size, before its bytes count. It leaves room for a million blocks that existed before
/// the first event: each takes 30 bytes in the file and far more in memory.
const BASE_BYTES: u64 = 256 << 20;

/// The bytes that each byte of a compressed file adds to the limit at most. Recordings compress to a tenth or a
/// fortieth, and take some 100 bytes per compressed byte.
const BYTES_PER_FILE_BYTE: u64 = 256;

/// The limit of any file. With it no table has 2^32 entries, because each entry has at least 8 bytes.
const MOST_BYTES: u64 = 24 << 30;

/// The overhead of one allocation.
const OVERHEAD_BYTES: u64 = 16;

/// The number of events that are processed between two checks of the memory.
pub(crate) const CHECK_EVERY_EVENTS: usize = 4096;

/// How much memory the bytes of a file justify, by its format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Density {
    /// A recording takes 1.5 to 2.7 bytes per byte of its pickle. A recording of torch 2.1, which pickles an event
    /// in 27 bytes, takes up to 3.6.
    Pickle,
    /// Half of the events of lowtide's own format may have two bytes each; an event in memory has 64.
    Compact,
}

impl Density {
    /// Returns how much memory may be taken after the first `expanded_bytes` of the decompressed file, which came
    /// from `file_bytes` of the file itself.
    pub(crate) fn bytes_max(self, expanded_bytes: u64, file_bytes: u64) -> u64 {
        let per_byte = match self {
            Density::Pickle => 4,
            Density::Compact => 32,
        };
        let of_expanded = expanded_bytes.saturating_mul(per_byte);
        let of_file = file_bytes.saturating_mul(BYTES_PER_FILE_BYTE);
        BASE_BYTES
            .saturating_add(of_expanded.min(of_file))
            .min(MOST_BYTES)
    }
}

/// The limit of a file's memory, and the memory that it has taken, in bytes.
#[derive(Debug)]
pub(crate) struct Budget {
    max: u64,
    taken: u64,
}

impl Budget {
    /// Returns a budget of `max` bytes, with none taken.
    pub(crate) fn new(max: u64) -> Budget {
        Budget { max, taken: 0 }
    }

    /// Takes the memory of `count` items of `bytes` each.
    ///
    /// # Errors
    ///
    /// If the limit is exceeded.
    pub(crate) fn take(&mut self, count: usize, bytes: u64) -> Result<()> {
        self.taken = self
            .taken
            .saturating_add((count as u64).saturating_mul(bytes));
        self.check(0)
    }

    /// Returns `bytes` to the budget.
    pub(crate) fn release(&mut self, bytes: u64) {
        self.taken = self.taken.saturating_sub(bytes);
    }

    /// Returns an error unless `bytes` more would be within the limit. Takes nothing.
    pub(crate) fn check(&self, bytes: u64) -> Result<()> {
        if self.taken.saturating_add(bytes) > self.max {
            return Err(too_much_memory());
        }
        Ok(())
    }
}

/// Returns about how much memory a vector takes that has `len` items of `item_bytes` and room for `capacity`.
pub(crate) fn vector_bytes(len: usize, capacity: usize, item_bytes: usize) -> u64 {
    const LARGE_BYTES: usize = 64 << 10;
    if capacity == 0 {
        return 0;
    }
    // A large vector has pages of its own. Pages beyond its items were never touched.
    let items = if capacity * item_bytes < LARGE_BYTES {
        capacity
    } else {
        len
    };
    (items * item_bytes) as u64 + OVERHEAD_BYTES
}

/// Returns the error of a part of a file that is longer than recordings have.
pub(crate) fn too_long(bytes: u64, max: u64) -> TraceError {
    let [bytes, max] = [bytes, max].map(Bytes);
    let what = format!("the file claims a part of {bytes}; recordings have none above {max}");
    TraceError::new(ErrorKind::Limit, what)
}

/// Returns the error of a file that would take more memory than its size justifies.
pub(crate) fn too_much_memory() -> TraceError {
    let what = "the file is made to take far more memory than its size; no recording does";
    TraceError::new(ErrorKind::Limit, what)
}
