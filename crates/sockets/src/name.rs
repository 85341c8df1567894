//! Names of sockets.

use std::ffi::OsStr;
use std::io;
use std::process;

use lowtide_files::unguessable_number;

/// The prefix of the sockets through which processes report their statistics.
const FIGURES: &str = "top-";

/// Returns a new name for the socket through which this process reports its statistics to `lowtide top`. Processes
/// of two containers may have the same process id, so the name also has a random number.
///
/// # Errors
///
/// If the system has no random bytes.
pub fn name_for_figures() -> io::Result<String> {
    let number = unguessable_number()?;
    Ok(format!("{FIGURES}{}-{number:032x}", process::id()))
}

/// Returns the process id in a name by [`name_for_figures`]; `None` for any other name.
pub fn process_of(name: &OsStr) -> Option<u32> {
    let rest = name.to_str()?.strip_prefix(FIGURES)?;
    rest.split_once('-')?.0.parse().ok()
}
