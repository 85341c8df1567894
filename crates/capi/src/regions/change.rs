//! Pausing and resuming regions, on all their devices.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::Arc;
use std::thread;

use lowtide_core::{Bytes, MempoolId, RouteOrder, Stream};
use lowtide_cuda::SignalsBlocked;
use lowtide_region::{
    BackupKind, Change, Copies, RegionError, RegionFigures, RegionState, release_copies,
};

use super::keeper;
use super::scrubbing;
use super::table::{self, OnDevice};
use crate::devices::{self, Allocator};
use crate::error::Error;

/// A region that was not changed on a device.
struct Failure {
    region: Arc<OnDevice>,
    error: Error,
    /// Whether the host has too little memory for its backup.
    is_short_of_host: bool,
}

/// Does something with every region of a tag, or with every region, on all devices at the same time. One that
/// fails does not keep the others from it; the first error, by device, is the answer.
pub(super) fn change(tag: Option<&str>, change: Change) -> Result<(), Error> {
    if let Some(tag) = tag {
        table::refuse_unknown(tag)?;
    }
    let mut regions = table::on_devices()?;
    regions.retain(|region| tag.is_none_or(|tag| *region.name.tag == *tag));
    let failures = change_on_devices(regions, change);
    let is_short = |failure: &Failure| failure.is_short_of_host;
    let (short, mut failures): (Vec<_>, Vec<_>) = failures.into_iter().partition(is_short);
    // What other devices' backups have left of the host's memory is as good. No keeper is held here: who holds one of
    // theirs may wait for this one's.
    if !short.is_empty() && release(Copies::Unshown).is_ok() {
        let short = short.into_iter().map(|failure| failure.region).collect();
        failures.extend(change_on_devices(short, change));
    } else {
        failures.extend(short);
    }
    let first = failures
        .into_iter()
        .min_by_key(|failure| failure.region.device);
    first.map_or(Ok(()), |failure| Err(failure.error))
}

/// Changes regions, those of each device one after the other, and returns those that were not changed, by device.
fn change_on_devices(regions: Vec<Arc<OnDevice>>, change: Change) -> Vec<Failure> {
    let mut devices: BTreeMap<c_int, Vec<_>> = BTreeMap::new();
    for region in regions {
        devices.entry(region.device).or_default().push(region);
    }
    let Some((_, first)) = devices.pop_first() else {
        return Vec::new();
    };
    thread::scope(|scope| {
        let others = devices.values().map(|regions| {
            let _signals = SignalsBlocked::begin();
            let thread = thread::Builder::new().name("lowtide change".into());
            let thread = thread.spawn_scoped(scope, || change_all(regions, change));
            (regions, thread)
        });
        let others: Vec<_> = others.collect();
        let mut failures = change_all(&first, change);
        for (regions, thread) in others {
            failures.extend(match thread {
                Ok(thread) => thread.join().unwrap_or_else(|_| {
                    let stopped = |region| Failure::new(region, keeper::stopped());
                    regions.iter().map(stopped).collect()
                }),
                // Where there is no thread, after the others.
                Err(_) => change_all(regions, change),
            });
        }
        failures
    })
}

/// Changes regions of one device, one after the other, and returns those that were not changed.
fn change_all(regions: &[Arc<OnDevice>], change: Change) -> Vec<Failure> {
    let before = mapped(regions);
    let failures = regions
        .iter()
        .filter_map(|region| change_one(region, change).err());
    let failures: Vec<_> = failures.collect();
    if let [region, ..] = regions {
        let moved = before.get().abs_diff(mapped(regions).get());
        scrubbing::begin(region.device, Bytes(moved));
    }
    failures
}

/// Changes a region on one device, whose keeper is nobody else's meanwhile.
fn change_one(region: &Arc<OnDevice>, change: Change) -> Result<(), Failure> {
    let failed = |error| Failure::new(region, error);
    let mut keeper = keeper::lock(region.device).map_err(failed)?;
    let on_device = table::memories_on(region.device).map_err(failed)?;
    let changed = change.apply(&region.memory, &on_device, &mut *keeper);
    changed.map_err(|error| Failure {
        is_short_of_host: error.is_short_of_host(),
        ..Failure::new(region, named(region, error))
    })
}

impl Failure {
    fn new(region: &Arc<OnDevice>, error: Error) -> Failure {
        Failure {
            region: Arc::clone(region),
            error,
            is_short_of_host: false,
        }
    }
}

/// Gives back what is kept for the next backups, and copies of regions that are mapped, on every device.
pub(super) fn release(copies: Copies) -> Result<(), Error> {
    for (device, _) in devices::all() {
        let mut keeper = keeper::lock(device)?;
        release_copies(&table::memories_on(device)?, copies, &mut *keeper)?;
        keeper.release_retained();
    }
    Ok(())
}

/// Returns how much regions have on their device.
fn mapped(regions: &[Arc<OnDevice>]) -> Bytes {
    let figures = regions
        .iter()
        .filter_map(|region| region.memory.figures().ok());
    figures.map(|figures| figures.mapped).sum()
}

/// Gives back what no block of a region uses on a device. Does nothing for a region that is not there.
pub(super) fn trim(device: c_int, tag: &str, kind: Option<BackupKind>) -> Result<(), Error> {
    let mut regions = table::on_devices()?.into_iter();
    let is_it = |region: &Arc<OnDevice>| {
        region.device == device && *region.name.tag == *tag && region.name.kind == kind
    };
    let Some(region) = regions.find(is_it) else {
        return Ok(());
    };
    let mut keeper = keeper::lock(device)?;
    let trimmed = region.memory.trim(&mut keeper);
    trimmed.map_err(|error| named(&region, error))
}

/// Serves requests of the streams that `accepts` names from a pool of a device, which has the memory of the process's
/// region from then on, if this thread is in that and the pool has no other yet.
pub(crate) fn begin_allocate_to_pool(
    device: c_int,
    allocator: &Allocator,
    pool: MempoolId,
    accepts: impl Fn(Stream) -> bool + Send + 'static,
) -> Result<(), Error> {
    if !table::is_in_process_region() {
        return Ok(allocator.with_pools(|lane| {
            lane.begin_allocate_to_pool(pool, RouteOrder::BeforeOthers, accepts)
        })??);
    }
    let region = table::of_process(device, allocator)?;
    Ok(region.memory.begin_allocate_to_pool(pool, accepts)?)
}

fn named(region: &OnDevice, failure: RegionError) -> Error {
    let more = match &failure {
        failure if failure.is_short_of_host() => retained_copies(),
        failure if failure.is_out_of_memory() => paused_on(region.device),
        _ => String::new(),
    };
    let device = region.device;
    let Error { status, text, .. } = failure.into();
    let tag = &region.name.tag;
    Error::new(
        status,
        format_args!("region {tag:?} on device {device}: {text}{more}"),
    )
}

/// Returns what a device is to have back, by tags, as the end of a sentence.
fn paused_on(device: c_int) -> String {
    let paused = bytes_by_tag(|region, _| {
        if region.device == device {
            region.memory.needed_to_resume().unwrap_or_default()
        } else {
            Bytes::ZERO
        }
    });
    format!("; paused there: {paused}")
}

/// Returns which copies of regions that are not paused the host has, and how they end, as the end of a sentence.
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

/// Returns the sums of a figure of the regions, by tags.
fn bytes_by_tag(figure: impl Fn(&OnDevice, &RegionFigures) -> Bytes) -> String {
    let mut sums: BTreeMap<Arc<str>, Bytes> = BTreeMap::new();
    for region in table::on_devices().unwrap_or_default() {
        if let Ok(figures) = region.memory.figures() {
            *sums.entry(Arc::clone(&region.name.tag)).or_default() += figure(&region, &figures);
        }
    }
    let sums = sums.iter().filter(|(_, bytes)| !bytes.is_zero());
    let sums: Vec<_> = sums
        .map(|(tag, bytes)| format!("{bytes} of region {tag:?}"))
        .collect();
    sums.join(", ")
}
