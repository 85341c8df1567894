//! Each device's backups, and their settings, which are the same for all devices.

use std::env;
use std::ffi::c_int;
use std::path::{self, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock};

use lowtide_core::Bytes;
use lowtide_cuda::{CudaBackups, Device, KeptMemory};
use lowtide_region::{BackupError, RegionError};

use crate::devices::DEVICES_MAX;
use crate::environment;
use crate::error::Error;
use crate::switch::Switch;

/// Whether the host memory of backups is retained, unless the program sets it.
static RETAINS: Switch = Switch::new("LOWTIDE_RETAIN_BACKUPS", false);

/// The directory of backup files, unless the program sets it.
static DIRECTORY: LazyLock<PathBuf> = LazyLock::new(|| {
    let ours = environment::path_variable("LOWTIDE_BACKUP_DIR");
    absolute(ours.unwrap_or_else(env::temp_dir))
});

static BACKUPS: [OnceLock<DeviceBackups>; DEVICES_MAX] = [const { OnceLock::new() }; DEVICES_MAX];

/// One device's backups. They are never dropped.
struct DeviceBackups {
    /// Locked while a region of the device is paused, resumed or trimmed.
    backups: Mutex<CudaBackups>,
    /// The host memory that they keep, for queries without that lock.
    kept: KeptMemory,
}

static SETTINGS: Mutex<Settings> = Mutex::new(Settings {
    directory: None,
    shows_files: false,
    retains: None,
});

/// What the program has set. `None` leaves it to the environment.
struct Settings {
    directory: Option<PathBuf>,
    shows_files: bool,
    retains: Option<bool>,
}

/// Locks a device's backups and applies the current settings to them. Creates them if necessary.
pub(super) fn lock(device: &Device) -> Result<MutexGuard<'static, CudaBackups>, RegionError> {
    let slot = &BACKUPS[device.ordinal() as usize];
    let of_device = match slot.get() {
        Some(of_device) => of_device,
        None => {
            let made = DeviceBackups::new(device)?;
            slot.get_or_init(|| made)
        }
    };
    let mut backups = of_device.backups.lock()?;
    let settings = SETTINGS.lock()?;
    backups.set_directory(settings.directory());
    backups.set_shows_files(settings.shows_files);
    backups.set_retain(settings.retains());
    Ok(backups)
}

/// Returns the error for a lock of regions that a panic has poisoned.
pub(super) fn stopped() -> Error {
    Error::stopped("while a region was entered or changed")
}

/// Returns how much host memory is kept for later backups of a device.
pub(crate) fn kept(device: c_int) -> Bytes {
    let index = usize::try_from(device).unwrap_or(usize::MAX);
    let of_device = BACKUPS.get(index).and_then(OnceLock::get);
    of_device.map_or(Bytes::ZERO, |of_device| of_device.kept.bytes())
}

/// Sets the directory of backup files from now on.
pub(crate) fn set_directory(directory: PathBuf) -> Result<(), Error> {
    SETTINGS.lock().map_err(|_| stopped())?.directory = Some(absolute(directory));
    Ok(())
}

/// Reads the default directory of backup files. It stays the same if the program changes its working directory.
pub(super) fn look_at_directory() {
    LazyLock::force(&DIRECTORY);
}

/// Returns the absolute path of a directory. The program may change its working directory before the first file is
/// created or the last is removed.
fn absolute(directory: PathBuf) -> PathBuf {
    path::absolute(&directory).unwrap_or(directory)
}

/// Returns whether the program has set the directory of backup files.
pub(crate) fn has_directory() -> bool {
    SETTINGS
        .lock()
        .is_ok_and(|settings| settings.directory.is_some())
}

/// Returns whether the program has set whether host memory is retained.
pub(crate) fn has_retain() -> bool {
    SETTINGS
        .lock()
        .is_ok_and(|settings| settings.retains.is_some())
}

/// Gives backup files a name in their directory from now on.
pub(crate) fn show_files() -> Result<(), Error> {
    SETTINGS.lock().map_err(|_| stopped())?.shows_files = true;
    Ok(())
}

/// Sets whether host memory is retained for later backups, on every device.
pub(crate) fn set_retain(retains: bool) -> Result<(), Error> {
    SETTINGS.lock().map_err(|_| stopped())?.retains = Some(retains);
    // At once, because memory that is idle now may see no further backup.
    for_each(|backups| backups.set_retain(retains))
}

/// Returns whether host memory is retained for later backups.
pub(crate) fn retains() -> bool {
    SETTINGS.lock().is_ok_and(|settings| settings.retains())
}

/// Waits until the host memory of backups is page-locked, as far as the system allows, on every device.
pub(super) fn finish_locking() -> Result<(), Error> {
    for_each(|backups| backups.finish_locking())
}

fn for_each(act: impl Fn(&mut CudaBackups)) -> Result<(), Error> {
    for of_device in BACKUPS.iter().filter_map(OnceLock::get) {
        act(&mut *of_device.backups.lock().map_err(|_| stopped())?);
    }
    Ok(())
}

impl DeviceBackups {
    fn new(device: &Device) -> Result<DeviceBackups, BackupError> {
        // SAFETY: 1. what is saved and restored are blocks of a region, mapped whole, and none of them is allocated
        // meanwhile; a program that uses them while their region is paused breaks the contract of `lowtide_pause`.
        // 2. No one resets the primary context while its memory is in use, which CUDA's documentation asks of every
        // program.
        let backups = unsafe { CudaBackups::new(device.clone()) }?;
        Ok(DeviceBackups {
            kept: backups.kept(),
            backups: Mutex::new(backups),
        })
    }
}

impl Settings {
    fn directory(&self) -> PathBuf {
        let chosen = self.directory.as_ref();
        chosen.unwrap_or(&DIRECTORY).clone()
    }

    fn retains(&self) -> bool {
        self.retains.unwrap_or_else(|| RETAINS.is_on())
    }
}
