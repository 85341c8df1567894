//! Pausing, resuming and trimming regions by their tags, and the texts of errors.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::Arc;

use lowtide_core::{Bytes, MempoolId, RouteOrder, Stream};
use lowtide_region::{
    BackupKind, Change, Copies, RegionError, RegionFigures, RegionState, release_copies,
};
use lowtide_shared::LaneOf;

use super::table::{self, Memory};
use crate::devices::Allocator;
use crate::error::Error;

/// Changes every region of a tag, or every region, on all devices.
pub(super) fn change(tag: Option<&str>, change: Change) -> Result<(), Error> {
    if let Some(tag) = tag {
        table::refuse_unknown(tag)?;
    }
    let is_chosen = |region: &Memory| tag.is_none_or(|tag| **region.tag() == *tag);
    let changed = change.apply(&table::memories()?, is_chosen);
    changed.map_err(|failure| named(&failure.region, failure.error))
}

/// Releases copies of mapped regions and the host memory that is kept for later backups, on every device.
pub(super) fn release(copies: Copies) -> Result<(), Error> {
    Ok(release_copies(&table::memories()?, copies)?)
}

/// Releases the memory of a region that no block uses on a device. Does nothing for a region that is not there.
pub(super) fn trim(device: c_int, tag: &str, kind: Option<BackupKind>) -> Result<(), Error> {
    let is_it = |region: &Arc<Memory>| **region.tag() == *tag && region.kind() == kind;
    match table::memories_on(device)?.into_iter().find(is_it) {
        Some(region) => region.trim().map_err(|error| named(&region, error)),
        None => Ok(()),
    }
}

/// Serves requests of the streams that `accepts` names from a pool of a device. If this thread is in the region of the
/// process, the pool joins that region, unless it has other memory already.
pub(crate) fn begin_allocate_to_pool(
    device: c_int,
    allocator: &Allocator,
    pool: MempoolId,
    accepts: impl Fn(Stream) -> bool + Send + 'static,
) -> Result<(), Error> {
    if !table::is_in_process_region() {
        return Ok(allocator.with_lane(LaneOf::Pools, |lane| {
            lane.begin_allocate_to_pool(pool, RouteOrder::BeforeOthers, accepts)
        })?);
    }
    let region = table::of_process(device, allocator)?;
    Ok(region.begin_allocate_to_pool(pool, accepts)?)
}

fn named(region: &Memory, failure: RegionError) -> Error {
    let more = match &failure {
        failure if failure.is_out_of_host_memory() => retained_copies(),
        failure if failure.is_out_of_memory() => paused_on(region.device().ordinal),
        _ => String::new(),
    };
    let device = region.device().ordinal;
    let Error { status, text, .. } = failure.into();
    let tag = region.tag();
    Error::new(
        status,
        format_args!("region {tag:?} on device {device}: {text}{more}"),
    )
}

/// Returns the bytes that a resume would take of a device, by tag, as the end of a message.
fn paused_on(device: c_int) -> String {
    let paused = bytes_by_tag(|region, _| {
        if region.device().ordinal == device {
            region.needed_to_resume().unwrap_or_default()
        } else {
            Bytes::ZERO
        }
    });
    format!("; paused there: {paused}")
}

/// Returns the host's copies of mapped regions, and how to release them, as the end of a message.
fn retained_copies() -> String {
    let retained = bytes_by_tag(|_, figures| match figures.state {
        RegionState::Mapped => figures.host,
        _ => Bytes::ZERO,
    });
    if retained.is_empty() {
        return String::new();
    }
    format!("; release_backups frees the copies that are retained: {retained}")
}

/// Returns the sums of a figure of the regions, by tag.
fn bytes_by_tag(figure: impl Fn(&Memory, &RegionFigures) -> Bytes) -> String {
    let mut sums: BTreeMap<Arc<str>, Bytes> = BTreeMap::new();
    for region in table::memories().unwrap_or_default() {
        if let Ok(figures) = region.figures() {
            *sums.entry(Arc::clone(region.tag())).or_default() += figure(&region, &figures);
        }
    }
    let sums = sums.iter().filter(|(_, bytes)| !bytes.is_zero());
    let sums: Vec<_> = sums
        .map(|(tag, bytes)| format!("{bytes} of region {tag:?}"))
        .collect();
    sums.join(", ")
}
