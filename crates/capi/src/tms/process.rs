//! The environment variables of torch_memory_saver.

use std::ffi::{CStr, CString};
use std::path::Path;
use std::sync::{LazyLock, Once};

use lowtide_region::BackupKind;

use crate::boundary::{self, run_and_report};
use crate::environment;
use crate::error::{Error, Status};
use crate::regions::{backups, table};

/// What the environment sets for every new thread. Read once, so that problems are reported once and all threads
/// agree.
pub(super) static ENVIRONMENT: LazyLock<Settings> = LazyLock::new(Settings::of_environment);

/// What a thread's calls have set for its requests.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) is_interesting: bool,
    pub(super) tag: CString,
    pub(super) keeps_on_cpu: bool,
    pub(super) keeps_on_disk: bool,
    /// Stored, without effect.
    pub(super) backend: CString,
}

impl Settings {
    /// A variable that is neither 0 nor 1 saves the contents that it may concern, and has no other effect.
    fn of_environment() -> Settings {
        Settings {
            is_interesting: is_set("TMS_INIT_ENABLE", false),
            tag: c"default".to_owned(),
            keeps_on_cpu: is_set("TMS_INIT_ENABLE_CPU_BACKUP", true),
            keeps_on_disk: is_set("TMS_INIT_ENABLE_DISK_BACKUP", true),
            backend: backend_of_environment().to_owned(),
        }
    }

    /// Returns the kind of backup. Host memory takes precedence over disk.
    pub(super) fn backup(&self) -> Option<BackupKind> {
        match (self.keeps_on_cpu, self.keeps_on_disk) {
            (true, _) => Some(BackupKind::Host),
            (false, true) => Some(BackupKind::Disk),
            (false, false) => None,
        }
    }
}

/// The kinds of host memory for backups; the first is the default.
pub(super) const BACKENDS: [&CStr; 2] = [c"pinned", c"mmap"];

/// Applies the environment's settings to the process, if the environment puts lowtide in the place of
/// torch_memory_saver's library. That library applies them at the process's first request, before any of its
/// functions is called.
pub(crate) fn start_if_named() {
    let names = environment::variable("LOWTIDE_COMPAT").unwrap_or_default();
    if names.split(',').any(|name| name == "torch_memory_saver") {
        start();
    }
}

/// Applies the environment's settings to the process, once. Settings that the program has made before take
/// precedence.
pub(super) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let directory = environment::path_variable("TMS_DISK_BACKUP_DIR");
        if let Some(directory) = directory.filter(|_| !backups::has_directory()) {
            report(|| set_backup_directory(&directory));
        }
        let settings = &*ENVIRONMENT;
        report(|| {
            if is_set("TMS_RETAIN_CPU_BACKUP", false) && !backups::has_retain() {
                backups::set_retain(true)?;
            }
            if settings.is_interesting {
                table::enter_process("default", settings.backup())?;
            }
            Ok(())
        });
    });
}

/// Saves backups on disk in a directory from now on, and creates it if necessary. If that fails, the setting is
/// still in force, because another directory would be a surprise. A pause then reports the failure again.
pub(super) fn set_backup_directory(directory: &Path) -> Result<(), Error> {
    backups::show_files()?;
    backups::set_directory(directory.to_owned())?;
    lowtide_files::create_directory(directory).map_err(|error| {
        let text = format_args!("{directory:?} for backups could not be made: {error}");
        Error::new(Status::Backup, text)
    })
}

/// Calls `act` and reports its failure to the user only.
pub(super) fn report(act: impl FnOnce() -> Result<(), Error>) {
    let _ = run_and_report(act);
}

fn backend_of_environment() -> &'static CStr {
    let value = environment::variable("TMS_INIT_CPU_BACKUP_BACKEND");
    let Some(value) = value.filter(|value| !value.is_empty()) else {
        return BACKENDS[0];
    };
    let mut known = BACKENDS.into_iter();
    let known = known.find(|known| known.to_bytes() == value.as_bytes());
    known.unwrap_or_else(|| {
        boundary::say(format_args!(
            "TMS_INIT_CPU_BACKUP_BACKEND is '{value}', and can be pinned or mmap; it is taken for pinned"
        ));
        BACKENDS[0]
    })
}

/// Returns whether a variable is set to a value that means yes. If the value means neither yes nor no, reports
/// that and returns `otherwise`.
fn is_set(variable: &str, otherwise: bool) -> bool {
    let value = environment::variable(variable).unwrap_or_default();
    match value.to_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => true,
        "" | "0" | "false" | "no" | "off" => false,
        _ => {
            let taken = u8::from(otherwise);
            boundary::say(format_args!(
                "{variable} is '{value}', and can be 0 or 1; it is taken for {taken}"
            ));
            otherwise
        }
    }
}
