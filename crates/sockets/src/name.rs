//! Names of sockets.

use std::ffi::OsStr;
use std::io;
use std::process;

use lowtide_files::unguessable_number;

/// What the names of sockets begin with at which processes show their figures.
const FIGURES: &str = "top-";

/// Returns a new name for the socket at which this process shows its figures to `lowtide top`. A process of another
/// container may have the same number, so the name has more.
///
/// # Errors
///
/// If the system has no random bytes.
pub fn name_for_figures() -> io::Result<String> {
    let number = unguessable_number()?;
    Ok(format!("{FIGURES}{}-{number:032x}", process::id()))
}

/// Returns the number of the process in a name by [`name_for_figures`]; `None` for any other name.
pub fn process_of(name: &OsStr) -> Option<u32> {
    let rest = name.to_str()?.strip_prefix(FIGURES)?;
    rest.split_once('-')?.0.parse().ok()
}
