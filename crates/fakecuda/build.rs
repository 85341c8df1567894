//! Gives the shared object the driver's name, and keeps it loaded.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // With this name, the object satisfies every later dlopen("libcuda.so.1") of its process.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // After a dlclose, the threads that serve streams would return into unmapped code.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
