//! Names the shared object as the driver is named, and keeps it loaded.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // With this name it answers to every later dlopen("libcuda.so.1") of its process.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Streams are served by threads that would return into unmapped code after a dlclose.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
