//! One device's backups, made when the first is wanted, and what the program set for all devices.

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

/// Whether the host's memory of backups is kept for the next pause, where the program does not say.
static RETAINS: Switch = Switch::new("LOWTIDE_RETAIN_BACKUPS", false);

/// Where files of backups are made, where the program does not say.
static DIRECTORY: LazyLock<PathBuf> = LazyLock::new(|| {
    let ours = environment::path_variable("LOWTIDE_BACKUP_DIR");
    absolute(ours.unwrap_or_else(env::temp_dir))
});

static BACKUPS: [OnceLock<DeviceBackups>; DEVICES_MAX] = [const { OnceLock::new() }; DEVICES_MAX];

/// One device's backups. Nothing ends them.
struct DeviceBackups {
    /// Locked while a region of the device is paused, resumed or trimmed.
    backups: Mutex<CudaBackups>,
    /// The host memory that they keep, which can be asked without that lock.
    kept: KeptMemory,
}

static SETTINGS: Mutex<Settings> = Mutex::new(Settings {
    directory: None,
    shows_files: false,
    retains: None,
});

/// What the program asked for; where it did not, the environment decides.
struct Settings {
    directory: Option<PathBuf>,
    shows_files: bool,
    retains: Option<bool>,
}

/// Locks a device's backups, which have the program's settings of this moment. They are made if there are none yet.
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

/// Returns the error after a panic.
pub(super) fn stopped() -> Error {
    Error::stopped("while a region was entered or changed")
}

/// Returns how much of the host's memory ended backups of a device have left for the next ones.
pub(crate) fn kept(device: c_int) -> Bytes {
    let index = usize::try_from(device).unwrap_or(usize::MAX);
    let of_device = BACKUPS.get(index).and_then(OnceLock::get);
    of_device.map_or(Bytes::ZERO, |of_device| of_device.kept.bytes())
}

/// Says where files of backups are made from now on.
pub(crate) fn set_directory(directory: PathBuf) -> Result<(), Error> {
    SETTINGS.lock().map_err(|_| stopped())?.directory = Some(absolute(directory));
    Ok(())
}

/// Looks where the environment has files of backups made. Later looks find the same, wherever the program has gone.
pub(super) fn look_at_directory() {
    LazyLock::force(&DIRECTORY);
}

/// Returns a directory by a name that it keeps: the program may go elsewhere before the first file is made, or the last
/// is removed.
fn absolute(directory: PathBuf) -> PathBuf {
    path::absolute(&directory).unwrap_or(directory)
}

/// Returns whether the program has said where files of backups are made.
pub(crate) fn has_directory() -> bool {
    SETTINGS
        .lock()
        .is_ok_and(|settings| settings.directory.is_some())
}

/// Returns whether the program has said what becomes of idle memory.
pub(crate) fn has_retain() -> bool {
    SETTINGS
        .lock()
        .is_ok_and(|settings| settings.retains.is_some())
}

/// Has files of backups be seen in their directory from now on.
pub(crate) fn show_files() -> Result<(), Error> {
    SETTINGS.lock().map_err(|_| stopped())?.shows_files = true;
    Ok(())
}

/// Says whether the host's memory that is idle stays for the next backups, on every device.
pub(crate) fn set_retain(retains: bool) -> Result<(), Error> {
    SETTINGS.lock().map_err(|_| stopped())?.retains = Some(retains);
    // What is idle may wait for no further backup, which would tell its engine.
    for_each(|backups| backups.set_retain(retains))
}

/// Returns whether the host's memory that is idle stays for the next backups.
pub(crate) fn retains() -> bool {
    SETTINGS.lock().is_ok_and(|settings| settings.retains())
}

/// Waits until the host's memory of backups is page-locked that the system lets be, on every device.
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
