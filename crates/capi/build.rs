//! Names the shared object, and lets the tests be linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // A library that was linked against it then finds the one that is loaded, whatever its path: a
    // process has one, because it owns the process's allocators.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,liblowtide.so");
    // Tests and examples link the library for Rust, which has functions of the driver's names, and that of
    // `fakecuda`, which has, too. They call neither by these names.
    for kind in ["tests", "examples"] {
        println!("cargo::rustc-link-arg-{kind}=-Wl,--allow-multiple-definition");
    }
}
