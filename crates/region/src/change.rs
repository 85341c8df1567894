//! A region that is changed on its device beside others, and what is tried again where memory is short.
//!
//! | short of memory | given back before the second attempt |
//! |---|---|
//! | the host, at a pause | copies of the device's other regions that nobody may read |
//! | the device, at a pause that failed and cannot be undone otherwise | what is cached on the device |
//! | the device, at a resume | what is cached on the device |

use std::sync::Arc;

use crate::backup::Backups;
use crate::device::Device;
use crate::error::RegionError;
use crate::memory::{Copies, RegionMemory};

/// What is done with a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// [`RegionMemory::pause`].
    Pause,
    /// [`RegionMemory::pause_and_drop`].
    PauseAndDrop,
    /// [`RegionMemory::resume`].
    Resume,
}

impl Change {
    /// Changes a region, a second time where memory was short and some could be given back. `on_device` are all regions of
    /// the device, of which `backups` has the copies. Copies that have ended go first: their memory is for this region's
    /// backup, or goes back in time.
    ///
    /// # Errors
    ///
    /// As the function of [`RegionMemory`] that does it.
    pub fn apply<D: Device, B: Backups>(
        self,
        region: &RegionMemory<D, B>,
        on_device: &[Arc<RegionMemory<D, B>>],
        backups: &mut B,
    ) -> Result<(), RegionError> {
        release_copies(on_device, Copies::Ended, backups)?;
        match (self, self.attempt(region, backups)) {
            (Change::Pause, Err(error)) if error.is_short_of_host() => {
                release_copies(on_device, Copies::Unshown, backups)?;
                self.attempt(region, backups)
            }
            (Change::Pause | Change::Resume, Err(error)) if error.is_out_of_memory() => {
                let allocator = region.device().allocator();
                allocator.with_all(|device| device.empty_cache())??;
                self.attempt(region, backups)
            }
            (_, outcome) => outcome,
        }
    }

    fn attempt<D: Device, B: Backups>(
        self,
        region: &RegionMemory<D, B>,
        backups: &mut B,
    ) -> Result<(), RegionError> {
        match self {
            Change::Pause => region.pause(backups),
            Change::PauseAndDrop => region.pause_and_drop(backups),
            Change::Resume => region.resume(backups),
        }
    }
}

/// Discards copies of regions that are mapped: their memory waits for the next backup.
///
/// # Errors
///
/// As [`RegionMemory::release_retained`], at the first region that fails.
pub fn release_copies<D: Device, B: Backups>(
    regions: &[Arc<RegionMemory<D, B>>],
    copies: Copies,
    backups: &mut B,
) -> Result<(), RegionError> {
    let mut regions = regions.iter();
    regions.try_for_each(|region| region.release_retained(copies, backups))
}
