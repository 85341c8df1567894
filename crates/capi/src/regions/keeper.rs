//! One device's backups, made when the first is wanted, and what the program set for all devices.

use std::env;
use std::ffi::c_int;
use std::path::{self, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock};

use lowtide_core::Bytes;
use lowtide_cuda::{CudaBackup, CudaBackups, KeptMemory};
use lowtide_region::{BackupError, BackupKind, Backups, MemoryRange};

use super::card::allocator;
use crate::devices::{self, DEVICES_MAX};
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

static KEEPERS: [Mutex<Keeper>; DEVICES_MAX] = [const {
    Mutex::new(Keeper {
        device: 0,
        engine: None,
    })
}; DEVICES_MAX];

/// What the devices' engines keep, which is asked without waiting for a pause or a resume.
static KEPT: [OnceLock<KeptMemory>; DEVICES_MAX] = [const { OnceLock::new() }; DEVICES_MAX];

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

/// One device's backups. Whoever holds it changes regions of the device.
#[derive(Debug)]
pub(crate) struct Keeper {
    device: c_int,
    engine: Option<CudaBackups>,
}

/// Returns the keeper of a device in use, once nobody else has it.
pub(super) fn lock(device: c_int) -> Result<MutexGuard<'static, Keeper>, Error> {
    let index = usize::try_from(device).unwrap_or(usize::MAX);
    let keeper = KEEPERS.get(index).ok_or_else(stopped)?;
    let mut keeper = keeper.lock().map_err(|_| stopped())?;
    keeper.device = device;
    Ok(keeper)
}

/// Returns the error after a panic.
pub(super) fn stopped() -> Error {
    Error::stopped("while a region was entered or changed")
}

/// Returns how much of the host's memory ended backups of a device have left for the next ones.
pub(crate) fn kept(device: c_int) -> Bytes {
    let index = usize::try_from(device).unwrap_or(usize::MAX);
    let kept = KEPT.get(index).and_then(OnceLock::get);
    kept.map_or(Bytes::ZERO, KeptMemory::bytes)
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
    for_each_engine(|engine| engine.set_retain(retains))
}

/// Returns whether the host's memory that is idle stays for the next backups.
pub(crate) fn retains() -> bool {
    SETTINGS.lock().is_ok_and(|settings| settings.retains())
}

/// Waits until the host's memory of backups is page-locked that the system lets be, on every device.
pub(super) fn finish_locking() -> Result<(), Error> {
    for_each_engine(|engine| engine.finish_locking())
}

fn for_each_engine(act: impl Fn(&mut CudaBackups)) -> Result<(), Error> {
    for (device, _) in devices::all() {
        lock(device)?.engine.iter_mut().for_each(&act);
    }
    Ok(())
}

impl Keeper {
    /// Gives back what is kept for the next backups.
    pub(super) fn release_retained(&mut self) {
        let engine = self.engine.iter_mut();
        engine.for_each(CudaBackups::release_retained);
    }

    /// Returns the device's engine, set as the program wants it now.
    fn engine(&mut self) -> Result<&mut CudaBackups, BackupError> {
        let engine = match self.engine.take() {
            Some(engine) => engine,
            None => {
                let device = allocator(self.device).with_driver(|driver| driver.device().clone());
                // SAFETY: 1. what is saved and restored are blocks of a region, mapped whole, which nothing is
                // handed out of meanwhile; a program that uses them while they are away breaks the contract
                // of `lowtide_pause`. 2. No one resets the primary context while its memory is in use, which
                // CUDA's documentation asks of every program.
                let engine = unsafe { CudaBackups::new(device) }?;
                let index = usize::try_from(self.device).expect("devices are counted from 0");
                // An engine is made once, as nothing ends it.
                KEPT[index].get_or_init(|| engine.kept());
                engine
            }
        };
        let engine = self.engine.insert(engine);
        if let Ok(settings) = SETTINGS.lock() {
            engine.set_directory(settings.directory());
            engine.set_shows_files(settings.shows_files);
            engine.set_retain(settings.retains());
        }
        Ok(engine)
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

impl Backups for Keeper {
    type Backup = CudaBackup;

    fn begin(
        &mut self,
        ranges: &[MemoryRange],
        kind: BackupKind,
    ) -> Result<CudaBackup, BackupError> {
        self.engine()?.begin(ranges, kind)
    }

    fn save_next(&mut self, backup: &mut CudaBackup) -> Result<usize, BackupError> {
        self.engine()?.save_next(backup)
    }

    fn restore(
        &mut self,
        backup: &mut CudaBackup,
        ranges: &[MemoryRange],
    ) -> Result<(), BackupError> {
        self.engine()?.restore(backup, ranges)
    }

    fn finish(&mut self) -> Result<(), BackupError> {
        self.engine.as_mut().map_or(Ok(()), CudaBackups::finish)
    }

    fn discard(&mut self, backup: CudaBackup) {
        // Where there is a backup, there is an engine.
        if let Ok(engine) = self.engine() {
            engine.discard(backup);
        }
    }

    fn retains(&mut self, backup: &CudaBackup) -> bool {
        self.engine().is_ok_and(|engine| engine.retains(backup))
    }

    fn host_copy(backup: &CudaBackup, range: MemoryRange) -> Option<usize> {
        CudaBackups::host_copy(backup, range)
    }

    fn bytes(backup: &CudaBackup) -> (Bytes, Bytes) {
        CudaBackups::bytes(backup)
    }
}
