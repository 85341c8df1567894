//! What an error says besides PyTorch's words of a request that ran out of memory: where the memory is, and
//! what would have served it.

use std::time::Duration;

use lowtide_core::{AllocError, Bytes};
use lowtide_explain::Shortfall;
use lowtide_shared::SharedError;

use crate::dump;
use crate::error::{Error, Status};
use crate::registry::{self, Allocator};

/// For how long other settings are tried. The program may go on after the error, and waits for it.
const BUDGET: Duration = Duration::from_millis(500);

/// Returns why a request failed. Without a lock, and without calls of the driver.
#[cold]
pub(crate) fn in_words(allocator: &Allocator, error: SharedError) -> Error {
    let explanation = match &error {
        SharedError::Alloc(AllocError::OutOfMemory(figures)) if is_wanted() => {
            explanation(allocator, figures).ok()
        }
        _ => None,
    };
    let mut error = Error::from(error);
    let is_out_of_memory = error.status == Status::OutOfMemory;
    let dumped = is_out_of_memory.then(dump::write_once).flatten();
    for line in [explanation, dumped].into_iter().flatten() {
        error.text.push('\n');
        error.text.push_str(&line);
    }
    error
}

/// Whether `LOWTIDE_OOM_EXPLAIN` does not forbid it.
fn is_wanted() -> bool {
    registry::variable("LOWTIDE_OOM_EXPLAIN").is_none_or(|text| text != "0")
}

/// What other threads did since the request failed is in it: their memory is not locked that long.
fn explanation(
    allocator: &Allocator,
    figures: &lowtide_core::OutOfMemory,
) -> Result<String, Error> {
    let (segments, events) = allocator.recent_past()?;
    let available = figures.reserved.saturating_add(figures.device_free);
    let shortfall = Shortfall {
        device: figures.device,
        requested: figures.requested,
        stream: figures.stream,
        pool: figures.pool,
        capacity: figures.limit.unwrap_or(Bytes(u64::MAX)).min(available),
        config: registry::config()?,
        segments,
        events,
    };
    Ok(shortfall.explain(BUDGET).to_string())
}
