//! What the environment asks of a process, by the variables of torch_memory_saver.

use std::ffi::CStr;
use std::path::Path;
use std::sync::{LazyLock, Once};

use lowtide_region::BackupKind;

use crate::boundary::{self, run_and_report};
use crate::environment;
use crate::error::{Error, Status};
use crate::regions::{keeper, table};

/// What the environment says of every thread at first. Read once: what is told of it is told once, and threads agree.
pub(super) static ENVIRONMENT: LazyLock<Environment> = LazyLock::new(Environment::read);

pub(super) struct Environment {
    pub(super) is_interesting: bool,
    pub(super) keeps_on_cpu: bool,
    pub(super) keeps_on_disk: bool,
    pub(super) backend: &'static CStr,
    retains: bool,
}

impl Environment {
    /// What is neither 0 nor 1 keeps contents that it may be about, and does nothing else.
    fn read() -> Environment {
        Environment {
            is_interesting: is_set("TMS_INIT_ENABLE", false),
            keeps_on_cpu: is_set("TMS_INIT_ENABLE_CPU_BACKUP", true),
            keeps_on_disk: is_set("TMS_INIT_ENABLE_DISK_BACKUP", true),
            backend: backend_of_environment(),
            retains: is_set("TMS_RETAIN_CPU_BACKUP", false),
        }
    }
}

/// The kinds of the host's memory that backups may be in; the first is what they are in where nothing is said.
pub(super) const BACKENDS: [&CStr; 2] = [c"pinned", c"mmap"];

/// Returns which backup contents have. The host's memory goes before disk.
pub(super) fn backup(keeps_on_cpu: bool, keeps_on_disk: bool) -> Option<BackupKind> {
    match (keeps_on_cpu, keeps_on_disk) {
        (true, _) => Some(BackupKind::Host),
        (false, true) => Some(BackupKind::Disk),
        (false, false) => None,
    }
}

/// Does what the environment asks of the process, where it puts lowtide in the other's place: the other's library does
/// it from the process's first request on, before anybody calls a function of it.
pub(crate) fn start_if_named() {
    let names = environment::variable("LOWTIDE_COMPAT").unwrap_or_default();
    if names.split(',').any(|name| name == "torch_memory_saver") {
        start();
    }
}

/// Does what the environment asks of the process, once; what the program has said by then goes before it.
pub(super) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let directory = environment::path_variable("TMS_DISK_BACKUP_DIR");
        if let Some(directory) = directory.filter(|_| !keeper::has_directory()) {
            report(|| set_backup_directory(&directory));
        }
        report(|| {
            if ENVIRONMENT.retains && !keeper::has_retain() {
                keeper::set_retain(true)?;
            }
            if ENVIRONMENT.is_interesting {
                let kind = backup(ENVIRONMENT.keeps_on_cpu, ENVIRONMENT.keeps_on_disk);
                table::enter_process("default", kind)?;
            }
            Ok(())
        });
    });
}

/// Keeps backups on disk in a directory from now on, which is made if need be. Where that fails it is in force all the
/// same: another would be a surprise, and a pause says so again.
pub(super) fn set_backup_directory(directory: &Path) -> Result<(), Error> {
    keeper::show_files()?;
    keeper::set_directory(directory.to_owned())?;
    lowtide_files::create_directory(directory).map_err(|error| {
        let text = format_args!("{directory:?} for backups could not be made: {error}");
        Error::new(Status::Backup, text)
    })
}

/// Does something of whose failure nobody but the user is told.
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

/// Returns whether a variable is set to what means yes; `otherwise`, and says so, for what means neither yes nor no.
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
