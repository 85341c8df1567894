//! How much memory a file may take, and how much of that it has taken.
//!
//! What counts is memory that is really touched: small allocations with what the allocator adds to
//! them, large ones as far as they are filled.

use lowtide_core::Bytes;

use crate::error::{ErrorKind, TraceError};

/// What a file of any size may take, before its bytes count: it leaves room for a million blocks that
/// were there before the first event, each of which takes far more than the 30 bytes that say so.
const BASE_BYTES: u64 = 256 << 20;

/// What each byte of a compressed file may add to that at most. Recordings shrink to a tenth or a
/// fortieth, and take some 100 bytes for each that is left.
const BYTES_PER_FILE_BYTE: u64 = 256;

/// What any file may take at most: then no table has 2^32 entries, of which none is below 8 bytes.
const MOST_BYTES: u64 = 24 << 30;

/// What an allocation costs beyond what is asked for.
const OVERHEAD_BYTES: u64 = 16;

/// How many events are walked between two looks at the memory that has been taken.
pub(crate) const CHECK_EVERY_EVENTS: usize = 4096;

/// The format of a file: how much memory its bytes justify.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Density {
    /// A recording takes 1.5 to 2.7 bytes for each of its pickle; one of torch 2.1, whose events are
    /// pickled in 27 bytes, up to 3.6.
    Pickle,
    /// Half of the events of lowtide's own format may be two bytes each; one in memory has 64.
    Compact,
}

impl Density {
    /// Returns how much memory may be spent after `expanded_bytes` of a file, to which `file_bytes`
    /// expanded.
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

/// What a file may take, and what it has taken, in bytes.
#[derive(Debug)]
pub(crate) struct Budget {
    max: u64,
    taken: u64,
}

impl Budget {
    /// Returns a budget of `max` bytes, of which nothing has been taken.
    pub(crate) fn new(max: u64) -> Budget {
        Budget { max, taken: 0 }
    }

    /// Takes `count` things of `bytes` each.
    ///
    /// # Errors
    ///
    /// If there is less left.
    pub(crate) fn take(&mut self, count: usize, bytes: u64) -> Result<(), TraceError> {
        self.taken = self
            .taken
            .saturating_add((count as u64).saturating_mul(bytes));
        self.check(0)
    }

    /// Gives back `bytes`.
    pub(crate) fn give_back(&mut self, bytes: u64) {
        self.taken = self.taken.saturating_sub(bytes);
    }

    /// Returns whether `bytes` more are left, which are not taken yet, as an error where they are not.
    pub(crate) fn check(&self, bytes: u64) -> Result<(), TraceError> {
        if self.taken.saturating_add(bytes) > self.max {
            return Err(too_much_memory());
        }
        Ok(())
    }
}

/// Returns about how much memory a vector of `len` items of `item_bytes` takes that has room for
/// `capacity`.
pub(crate) fn vector_bytes(len: usize, capacity: usize, item_bytes: usize) -> u64 {
    const LARGE_BYTES: usize = 64 << 10;
    if capacity == 0 {
        return 0;
    }
    // A large one has memory of its own, and where it has not been filled that was never touched.
    let items = if capacity * item_bytes < LARGE_BYTES {
        capacity
    } else {
        len
    };
    (items * item_bytes) as u64 + OVERHEAD_BYTES
}

/// Says that something in a file is longer than such things are.
pub(crate) fn too_long(bytes: u64, max: u64) -> TraceError {
    let [bytes, max] = [bytes, max].map(Bytes);
    let what = format!("the file claims a part of {bytes}; recordings have none above {max}");
    TraceError::new(ErrorKind::Limit, what)
}

/// Says that a file would take more memory than its size justifies.
pub(crate) fn too_much_memory() -> TraceError {
    let what = "the file is made to take far more memory than its size; no recording does";
    TraceError::new(ErrorKind::Limit, what)
}
