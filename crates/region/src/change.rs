//! Pausing and resuming several regions, on several devices at the same time. If memory is short, some is released for
//! a second attempt:
//!
//! | short of memory | released before the second attempt |
//! |---|---|
//! | the host, at a pause | copies of the device's other regions that the program does not read |
//! | the host, still | such copies on every device, and the host memory that is kept for later backups |
//! | the device, at a resume | what is missing, of memory that `tide` keeps idle |
//! | the device, still | what is cached on the device |
//! | the device, at a pause that failed and could not be undone | what is cached on the device |

use std::fmt;
use std::sync::Arc;
use std::thread::{self, Scope, ScopedJoinHandle};

use lowtide_core::{Bytes, Lane};
use lowtide_shared::LaneOf;

use crate::backup::Backups;
use crate::device::Device;
use crate::error::RegionError;
use crate::memory::{Copies, RegionMemory};

/// What to do with regions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// [`RegionMemory::pause`] with a backup of the region's kind.
    Pause,
    /// [`RegionMemory::pause`] without a backup.
    PauseAndDrop,
    /// [`RegionMemory::resume`].
    Resume,
}

/// A region that could not be changed, and why.
pub struct ChangeError<D: Device> {
    /// The region.
    pub region: Arc<RegionMemory<D>>,
    /// Why it was not changed.
    pub error: RegionError,
}

impl Change {
    /// Changes the regions that `is_chosen` names: all devices at the same time, the regions of a device one after the
    /// other. If a region fails, the others are still changed and stay so. `regions` are all regions of the process:
    /// copies of any of them may be released for a backup.
    ///
    /// # Errors
    ///
    /// The first failure, by device.
    pub fn apply<D: Device>(
        self,
        regions: &[Arc<RegionMemory<D>>],
        is_chosen: impl Fn(&RegionMemory<D>) -> bool,
    ) -> Result<(), ChangeError<D>> {
        let chosen = regions.iter().filter(|region| is_chosen(region));
        let failures = self.on_devices(chosen.cloned().collect(), regions);
        let (short, mut failures): (Vec<_>, Vec<_>) = failures
            .into_iter()
            .partition(|failure| failure.error.is_out_of_host_memory());
        // Host memory that another device's backups keep serves as well. No backups are locked here, because a thread
        // that has locked those may be waiting for others.
        if !short.is_empty() && release_copies(regions, Copies::Unread).is_ok() {
            let short = short.into_iter().map(|failure| failure.region);
            failures.extend(self.on_devices(short.collect(), regions));
        } else {
            failures.extend(short);
        }
        let number = |failure: &ChangeError<D>| failure.region.device().number();
        failures.into_iter().min_by_key(number).map_or(Ok(()), Err)
    }

    /// Changes regions, with one thread for each device. Returns the failures.
    fn on_devices<D: Device>(
        self,
        mut chosen: Vec<Arc<RegionMemory<D>>>,
        regions: &[Arc<RegionMemory<D>>],
    ) -> Vec<ChangeError<D>> {
        chosen.sort_by_key(|region| region.device().number());
        let mut devices = by_device(&chosen);
        let Some(first) = devices.next() else {
            return Vec::new();
        };
        thread::scope(|scope| {
            let others = devices.map(|chosen| (chosen, self.start(scope, chosen, regions)));
            let others: Vec<_> = others.collect();
            let mut failures = self.on_device(first, regions);
            for (chosen, thread) in others {
                failures.extend(match thread {
                    Ok(thread) => thread.join().unwrap_or_else(|_| {
                        let stopped = |region| ChangeError::new(region, RegionError::Poisoned);
                        chosen.iter().map(stopped).collect()
                    }),
                    // Without a thread, after the other devices.
                    Err(_) => self.on_device(chosen, regions),
                });
            }
            failures
        })
    }

    /// Starts a thread that changes regions of one device.
    fn start<'scope, D: Device>(
        self,
        scope: &'scope Scope<'scope, '_>,
        chosen: &'scope [Arc<RegionMemory<D>>],
        regions: &'scope [Arc<RegionMemory<D>>],
    ) -> std::io::Result<ScopedJoinHandle<'scope, Vec<ChangeError<D>>>> {
        let _signals = chosen[0].device().block_signals();
        let thread = thread::Builder::new().name("lowtide change".into());
        thread.spawn_scoped(scope, move || self.on_device(chosen, regions))
    }

    /// Changes regions of one device, one after the other. Returns the failures.
    fn on_device<D: Device>(
        self,
        chosen: &[Arc<RegionMemory<D>>],
        regions: &[Arc<RegionMemory<D>>],
    ) -> Vec<ChangeError<D>> {
        let device = chosen[0].device();
        let number = device.number();
        let of_device = regions
            .iter()
            .filter(|region| region.device().number() == number);
        let of_device: Vec<_> = of_device.cloned().collect();
        let before = mapped(chosen);
        let failures = chosen.iter().filter_map(|region| {
            let changed = self.with_retry(region, &of_device);
            changed.err().map(|error| ChangeError::new(region, error))
        });
        let failures: Vec<_> = failures.collect();
        device.finish_change(Bytes(before.get().abs_diff(mapped(chosen).get())));
        failures
    }

    /// Changes a region, and again if memory was short and some could be released on the device. Copies that have
    /// ended are released first: this region's backup may use their memory. The backups are locked throughout, so that no
    /// other thread takes what is released for the second attempt.
    fn with_retry<D: Device>(
        self,
        region: &RegionMemory<D>,
        of_device: &[Arc<RegionMemory<D>>],
    ) -> Result<(), RegionError> {
        let mut locked = region.device().lock_backups()?;
        let backups = &mut *locked;
        release_each(of_device, Copies::Ended, backups)?;
        match (self, self.attempt(region, backups)) {
            (Change::Pause, Err(error)) if error.is_out_of_host_memory() => {
                release_each(of_device, Copies::Unread, backups)?;
                self.attempt(region, backups)
            }
            (Change::Pause | Change::Resume, Err(error)) if error.is_out_of_memory() => {
                let mut outcome = Err(error);
                let allocator = region.device().allocator();
                if let Err(RegionError::NoRoom { needed, .. }) = outcome {
                    let release = |lane: &mut Lane<_>| lane.release_idle(needed);
                    if allocator.with_lane(LaneOf::Pools, release)? {
                        outcome = self.attempt(region, backups);
                    }
                }
                if outcome.as_ref().is_err_and(RegionError::is_out_of_memory) {
                    allocator.with_all(|device| device.empty_cache(None))??;
                    outcome = self.attempt(region, backups);
                }
                outcome
            }
            (_, outcome) => outcome,
        }
    }

    fn attempt<D: Device>(
        self,
        region: &RegionMemory<D>,
        backups: &mut D::Backups,
    ) -> Result<(), RegionError> {
        match self {
            Change::Pause => region.pause(region.kind(), backups),
            Change::PauseAndDrop => region.pause(None, backups),
            Change::Resume => region.resume(backups),
        }
    }
}

/// Releases copies of mapped regions, and the host memory that is kept for later backups of their devices.
///
/// # Errors
///
/// [`RegionError::Poisoned`], or the error of [`Device::lock_backups`]. Devices after the one that failed keep their copies.
pub fn release_copies<D: Device>(
    regions: &[Arc<RegionMemory<D>>],
    copies: Copies,
) -> Result<(), RegionError> {
    let mut regions = regions.to_vec();
    regions.sort_by_key(|region| region.device().number());
    by_device(&regions).try_for_each(|regions| {
        let mut backups = regions[0].device().lock_backups()?;
        release_each(regions, copies, &mut *backups)?;
        backups.release_retained();
        Ok(())
    })
}

fn release_each<D: Device>(
    regions: &[Arc<RegionMemory<D>>],
    copies: Copies,
    backups: &mut D::Backups,
) -> Result<(), RegionError> {
    let mut regions = regions.iter();
    regions.try_for_each(|region| region.release_copy(copies, backups))
}

/// Returns the regions of each device. `regions` are sorted by device.
fn by_device<D: Device>(
    regions: &[Arc<RegionMemory<D>>],
) -> impl Iterator<Item = &[Arc<RegionMemory<D>>]> {
    regions.chunk_by(|one, next| one.device().number() == next.device().number())
}

/// Returns how many bytes regions have on their device.
fn mapped<D: Device>(regions: &[Arc<RegionMemory<D>>]) -> Bytes {
    let figures = regions.iter().filter_map(|region| region.figures().ok());
    figures.map(|figures| figures.mapped).sum()
}

impl<D: Device> ChangeError<D> {
    fn new(region: &Arc<RegionMemory<D>>, error: RegionError) -> ChangeError<D> {
        ChangeError {
            region: Arc::clone(region),
            error,
        }
    }
}

impl<D: Device> fmt::Debug for ChangeError<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.region.device().number();
        let mut error = f.debug_struct("ChangeError");
        error
            .field("device", &device)
            .field("error", &self.error)
            .finish()
    }
}
