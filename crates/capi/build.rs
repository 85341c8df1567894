//! Names the shared object, and what `cargo xtask tsan` leaves out.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // ThreadSanitizer looks its own functions up before anything of ours can run.
    println!("cargo::rustc-check-cfg=cfg(lowtide_tsan)");
    // A library that was linked against it then finds the one that is loaded, whatever its path: a
    // process has one, because it owns the process's allocators.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,liblowtide.so");
    // Its threads run, and it manages the process's memory, after whoever opened it has closed it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
