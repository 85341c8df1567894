//! What a test needs to load the shared object: its path, and a structure of its header.
//!
//! Programs that define functions with the driver's names cannot link this crate, and include this file instead.

use std::path::PathBuf;

/// The numbers of live objects: `fakecuda_live` of the header, which says what counts.
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

/// Returns the path of the shared object that cargo built. It lies beside the test that calls this, if the test's
/// crate depends on this one. After it was opened by this path, every `dlopen("libcuda.so.1")` of the process finds
/// it, because it has that name.
///
/// # Panics
///
/// If the program's path is unknown, or the shared object does not exist.
pub fn library_path() -> PathBuf {
    let program = std::env::current_exe().expect("a process knows its program");
    // Tests lie in `deps`, examples in a directory beside it.
    let mut directories = program.ancestors().skip(1).take(2);
    directories
        .find_map(|directory| {
            // Cargo puts dependencies of a program into `deps`, and only explicitly requested targets beside it.
            let paths = ["deps/libfakecuda.so", "libfakecuda.so"];
            let mut paths = paths.map(|path| directory.join(path)).into_iter();
            paths.find(|path| path.exists())
        })
        .unwrap_or_else(|| panic!("no libfakecuda.so above {}", program.display()))
}
