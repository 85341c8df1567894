//! The driver's library: opened at run time, its functions looked up once.

use std::error::Error;
use std::ffi::{CStr, OsStr, c_char, c_int};
use std::mem::forget;
use std::ptr;
use std::sync::Arc;

use lowtide_core::DriverError;

use crate::error::{CudaVersion, LoadError};
use crate::functions::{Functions, find};
use crate::sys::CUresult;

/// NVIDIA's driver in this process, initialized.
///
/// The library stays loaded until the process exits, because the driver's threads run its code.
#[derive(Debug)]
pub struct Library {
    pub(crate) functions: Functions,
    version: CudaVersion,
}

/// Calls a function of a [`Library`] and converts what it returns to a `Result`. The caller wraps it in an `unsafe`
/// block that says why the call is sound.
macro_rules! call {
    ($library:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        let library: &crate::library::Library = $library;
        library.check(stringify!($name), (library.functions.$name)($($argument),*))
    }};
}

/// Like `call!`, for a function that older drivers lack.
macro_rules! call_optional {
    ($library:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        let library: &crate::library::Library = $library;
        match library.functions.$name {
            Some(function) => library.check(stringify!($name), function($($argument),*)),
            None => Err(lowtide_core::DriverError::Unsupported { call: stringify!($name) }),
        }
    }};
}

pub(crate) use {call, call_optional};

impl Library {
    /// The oldest supported driver, that of CUDA 11.3. It has every function and attribute that lowtide needs. The
    /// PyTorch versions that lowtide supports need a newer one.
    const VERSION_MIN: CudaVersion = CudaVersion(11_030);

    /// Opens and initializes this machine's driver, `libcuda.so.1`.
    ///
    /// This creates no context and takes no device memory. A process that forks afterwards cannot use CUDA in the
    /// child.
    ///
    /// # Errors
    ///
    /// [`LoadError`] says what is missing.
    pub fn load() -> Result<Arc<Library>, LoadError> {
        // SAFETY: the name is that of NVIDIA's driver.
        unsafe { Library::open("libcuda.so.1") }
    }

    /// Like [`Library::load`], but opens the library at `path`.
    ///
    /// # Errors
    ///
    /// [`LoadError`] says what is missing.
    ///
    /// # Safety
    ///
    /// The library must be NVIDIA's driver, or behave as `cuda.h` says it does.
    pub unsafe fn open(path: impl AsRef<OsStr>) -> Result<Arc<Library>, LoadError> {
        let path = path.as_ref();
        // SAFETY: loading runs only the driver's code, by the contract of this function.
        let loaded = unsafe { libloading::Library::new(path) };
        let loaded = loaded.map_err(|error| LoadError::NotFound {
            message: one_line(&error),
        })?;
        let version = version(&loaded)?;
        if version < Library::VERSION_MIN {
            return Err(LoadError::TooOld {
                found: version,
                needed: Library::VERSION_MIN,
            });
        }
        let library = Library {
            functions: Functions::find_all(&loaded)?,
            version,
        };
        // From here on the functions are called, so the library must never be closed.
        forget(loaded);

        // SAFETY: takes a number only.
        match unsafe { (library.functions.cuInit)(0) } {
            CUresult::NO_DEVICE => Err(LoadError::NoDevice),
            result => library.check("cuInit", result).map_err(LoadError::Start),
        }?;
        Ok(Arc::new(library))
    }

    /// Returns the newest CUDA version that the driver supports.
    pub fn version(&self) -> CudaVersion {
        self.version
    }

    /// Converts what a call returned to a `Result`.
    #[inline]
    pub(crate) fn check(&self, call: &'static str, result: CUresult) -> Result<(), DriverError> {
        match result {
            CUresult::SUCCESS => Ok(()),
            _ => Err(self.error(call, result)),
        }
    }

    /// Returns the allocator's error for a failed call.
    #[cold]
    fn error(&self, call: &'static str, result: CUresult) -> DriverError {
        match result {
            CUresult::OUT_OF_MEMORY => DriverError::OutOfMemory,
            CUresult::NOT_SUPPORTED => DriverError::Unsupported { call },
            _ => DriverError::Failed {
                call,
                code: result.0.cast_signed(),
                message: self.describe(result),
            },
        }
    }

    /// Returns an error's description and name: `invalid argument (CUDA_ERROR_INVALID_VALUE)`.
    fn describe(&self, error: CUresult) -> String {
        let mut text: *const c_char = ptr::null();
        // SAFETY: the call writes `text`, which outlives it.
        let result = unsafe { (self.functions.cuGetErrorString)(error, &raw mut text) };
        // SAFETY: after success `text` is null or a string of the library's, which is never unloaded.
        let words = unsafe { static_text(result, text) };

        let mut text: *const c_char = ptr::null();
        // SAFETY: the call writes `text`, which outlives it.
        let result = unsafe { (self.functions.cuGetErrorName)(error, &raw mut text) };
        // SAFETY: as above.
        let name = unsafe { static_text(result, text) };

        match (words, name) {
            (Some(words), Some(name)) => format!("{words} ({name})"),
            (Some(only), None) | (None, Some(only)) => only,
            (None, None) => "the driver has no words for it".to_owned(),
        }
    }
}

/// Returns the text that a call wrote, if the call succeeded.
///
/// # Safety
///
/// If `result` is a success, `text` must be null or a zero-terminated string that never changes.
unsafe fn static_text(result: CUresult, text: *const c_char) -> Option<String> {
    if result != CUresult::SUCCESS || text.is_null() {
        return None;
    }
    // SAFETY: not null, and a string by the contract of this function.
    let text = unsafe { CStr::from_ptr(text) };
    Some(text.to_string_lossy().into_owned())
}

fn version(loaded: &libloading::Library) -> Result<CudaVersion, LoadError> {
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> CUresult;
    // SAFETY: cuda.h gives `cuDriverGetVersion` this type.
    let get_version: GetVersion = unsafe { find(loaded, "cuDriverGetVersion") }?;
    let mut version = 0;
    // SAFETY: 1. the call writes `version`, which outlives it. 2. It may be made before `cuInit`.
    match unsafe { get_version(&raw mut version) } {
        CUresult::SUCCESS => Ok(CudaVersion(version)),
        result => Err(LoadError::Start(DriverError::Failed {
            call: "cuDriverGetVersion",
            code: result.0.cast_signed(),
            message: "the driver does not know its version".to_owned(),
        })),
    }
}

/// Returns the loader's message, which may contain a path, as one line.
fn one_line(error: &libloading::Error) -> String {
    let text = match error.source() {
        Some(source) => source.to_string(),
        None => error.to_string(),
    };
    text.replace(char::is_control, " ")
}
