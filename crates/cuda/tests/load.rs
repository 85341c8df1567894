//! The errors without a driver. Not covered: opening the machine's own driver, because the result depends on the
//! machine.
#![expect(unsafe_code, reason = "libraries are opened by path")]

use std::path::Path;

use lowtide_cuda::{CudaVersion, Library, LoadError};

/// Returns the error for a file that is not a driver.
fn refusal(path: &Path) -> LoadError {
    // SAFETY: the file at `path` is no library, or a library that does nothing when it is loaded.
    let opened = unsafe { Library::open(path) };
    opened.expect_err("it is no driver")
}

#[test]
fn a_missing_library_is_named() {
    let error = refusal(Path::new("libnot-there.so.1"));
    assert!(matches!(error, LoadError::NotFound { .. }), "{error:?}");
    assert_eq!(
        error.to_string(),
        "NVIDIA's driver cannot be loaded: libnot-there.so.1: cannot open shared object file: No such \
         file or directory"
    );
}

#[test]
fn a_message_is_one_line_whatever_the_path() {
    let text = refusal(Path::new("no\nlibrary")).to_string();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("no library"), "{text}");
}

#[test]
fn a_file_that_is_no_library_is_refused() {
    let error = refusal(Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/Cargo.toml"
    )));
    assert!(matches!(error, LoadError::NotFound { .. }), "{error:?}");
}

#[test]
fn a_library_that_is_no_driver_is_refused() {
    let error = refusal(Path::new("libc.so.6"));
    let name = "cuDriverGetVersion";
    assert_eq!(error, LoadError::MissingFunction { name });
    assert_eq!(
        error.to_string(),
        "what was loaded as NVIDIA's driver lacks cuDriverGetVersion"
    );
}

#[test]
fn versions_are_written_as_cuda_is() {
    let (found, needed) = (CudaVersion(10_020), CudaVersion(11_030));
    assert_eq!(
        LoadError::TooOld { found, needed }.to_string(),
        "NVIDIA's driver is too old: it supports CUDA 10.2, lowtide needs 11.3"
    );
}
