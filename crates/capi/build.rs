//! Names the shared object.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // A library that was linked against it then finds the one that is loaded, whatever its path: a
    // process has one, because it owns the process's allocators.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,liblowtide.so");
}
