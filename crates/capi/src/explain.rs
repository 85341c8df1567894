//! What out-of-memory errors say in addition to PyTorch's text: where the memory is, and which settings would
//! have served the request.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lowtide_core::{AllocError, Bytes};
use lowtide_explain::Shortfall;

use crate::devices::Allocator;
use crate::dump;
use crate::error::Error;
use crate::regions::figures;
use crate::settings;
use crate::switch::Switch;

/// Whether errors have more than PyTorch's text.
static EXPLAINS: Switch = Switch::new("LOWTIDE_OOM_EXPLAIN", true);

/// The time for trying other settings for one request. The program waits for it, and may continue after the
/// error.
const BUDGET: Duration = Duration::from_millis(500);

/// The time for trying settings in the whole process. A program that finds its batch size by failing may fail
/// thousands of times.
const BUDGET_OF_PROCESS: Duration = Duration::from_secs(2);

static SPENT_MS: AtomicU64 = AtomicU64::new(0);

/// Returns why a request failed. Takes no lock and makes no driver call.
#[cold]
pub(crate) fn in_words(allocator: &Allocator, error: AllocError) -> Error {
    let AllocError::OutOfMemory(mut figures) = error else {
        return error.into();
    };
    if let Ok(Some(release)) = settings::torch() {
        figures.torch = release;
    }
    let explanation = EXPLAINS
        .is_on()
        .then(|| spared(|| explanation(allocator, &figures).ok()));
    let dumped = spared(dump::write_once);
    let mut error = Error::from(AllocError::OutOfMemory(figures));
    for line in [explanation.flatten(), dumped].into_iter().flatten() {
        error.text.push('\n');
        error.text.push_str(&line);
    }
    error
}

/// Returns the result of `act`, or `None` if it panics: the caller must still get its out-of-memory error.
fn spared(act: impl FnOnce() -> Option<String>) -> Option<String> {
    catch_unwind(AssertUnwindSafe(act)).ok().flatten()
}

/// Includes what other threads did since the request failed, because their memory is not locked that long.
fn explanation(
    allocator: &Allocator,
    figures: &lowtide_core::OutOfMemory,
) -> Result<String, Error> {
    let past = allocator
        .with_all(|device| device.recent_past())?
        .on_device();
    let start = Instant::now();
    let spent = Duration::from_millis(SPENT_MS.load(Ordering::Relaxed));
    let reserved: Bytes = past.segments.iter().map(|segment| segment.size).sum();
    let available = reserved.saturating_add(figures.device_free);
    let shortfall = Shortfall {
        device: figures.device,
        requested: figures.requested,
        stream: figures.stream,
        pool: figures.pool,
        capacity: figures.limit.unwrap_or(Bytes(u64::MAX)).min(available),
        is_limited: figures.limit.is_some(),
        kept_by_margin: figures::kept_by_margin(figures)?,
        config: settings::config()?,
        free_block_order: settings::order()?,
        configured: settings::configured()?,
        segments: past.segments,
        kept_pools: past.kept,
        events: past.events,
    };
    let budget = BUDGET.min(BUDGET_OF_PROCESS.saturating_sub(spent));
    let text = shortfall.explain(budget).to_string();
    let took_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
    SPENT_MS.fetch_add(took_ms, Ordering::Relaxed);
    Ok(text)
}
