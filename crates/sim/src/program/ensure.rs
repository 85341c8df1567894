//! Conditions that must hold. A broken condition becomes an error sentence.

use lowtide_core::Stats;

/// Returns the sentence `otherwise` as an error unless `holds` is true.
pub(super) fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}

/// Returns an error that names two numbers unless they are equal.
pub(super) fn ensure_equal(what: &str, found: u64, known: u64) -> Result<(), String> {
    ensure(found == known, || {
        format!("{what}: {found} instead of {known}")
    })
}

/// Returns an error if a refused operation changed the figures.
pub(super) fn ensure_unchanged(before: &Stats, after: &Stats) -> Result<(), String> {
    ensure(before == after, || {
        format!("a refused operation changed {before:?} to {after:?}")
    })
}
