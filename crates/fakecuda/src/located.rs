//! What must be known of the shared object to load it.
//!
//! Programs that have functions of the driver's names themselves cannot link this crate, and include this file.

use std::path::PathBuf;

/// What was made and not given back; `fakecuda_live` in the header, which says what counts.
#[allow(missing_docs, reason = "each field is the number of what it is called")]
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Live {
    pub contexts: u64,
    pub allocations: u64,
    pub reservations: u64,
    pub handles: u64,
    pub mappings: u64,
    pub host_allocations: u64,
    pub streams: u64,
    pub events: u64,
    pub graphs: u64,
}

/// Returns where cargo built the shared object: beside the test that calls this, if the test's crate
/// depends on this one. Opening it by this path makes every later `dlopen("libcuda.so.1")` of the
/// process find it, as it bears that name.
///
/// # Panics
///
/// If the program does not know where it lies itself, or the shared object is not there.
pub fn library_path() -> PathBuf {
    let program = std::env::current_exe().expect("a process knows its program");
    // Tests lie in `deps`, examples in a directory beside it.
    let mut directories = program.ancestors().skip(1).take(2);
    directories
        .find_map(|directory| {
            // Cargo puts what a program depends on into `deps`, and only what it was asked for beside that.
            let paths = ["deps/libfakecuda.so", "libfakecuda.so"];
            let mut paths = paths.map(|path| directory.join(path)).into_iter();
            paths.find(|path| path.exists())
        })
        .unwrap_or_else(|| panic!("no libfakecuda.so above {}", program.display()))
}
