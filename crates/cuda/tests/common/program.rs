//! The driver calls of a program that an allocator does not make: current device, streams, captures.

use std::error::Error;
use std::ffi::{OsStr, c_int, c_uint, c_void};
use std::ptr;

use lowtide_core::Stream;

/// A program's own driver calls.
#[derive(Debug)]
pub(crate) struct Program {
    library: libloading::Library,
}

type Answer = Result<(), Box<dyn Error>>;

impl Program {
    pub(crate) fn new(library: &OsStr) -> Result<Program, Box<dyn Error>> {
        // SAFETY: the library is a driver and loaded already.
        let library = unsafe { libloading::Library::new(library) }?;
        Ok(Program { library })
    }

    /// Returns a function of the driver.
    ///
    /// # Safety
    ///
    /// `F` must be the function's type in cuda.h.
    unsafe fn function<F: Copy>(&self, name: &str) -> Result<F, Box<dyn Error>> {
        // SAFETY: by the contract of this function.
        Ok(*unsafe { self.library.get::<F>(name) }?)
    }

    /// Makes the device's primary context current in this thread.
    pub(crate) fn use_device(&self, device: c_int) -> Answer {
        type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_uint;
        type SetCurrent = unsafe extern "C" fn(*mut c_void) -> c_uint;
        // SAFETY: the type is cuda.h's.
        let retain: Retain = unsafe { self.function("cuDevicePrimaryCtxRetain") }?;
        // SAFETY: the type is cuda.h's.
        let set_current: SetCurrent = unsafe { self.function("cuCtxSetCurrent") }?;
        let mut context = ptr::null_mut();
        // SAFETY: the call writes `context`, which outlives it.
        check("cuDevicePrimaryCtxRetain", unsafe {
            retain(&raw mut context, device)
        })?;
        // SAFETY: the context is retained.
        check("cuCtxSetCurrent", unsafe { set_current(context) })
    }

    /// Returns the context that is current in this thread, or 0 if there is none.
    pub(crate) fn current_context(&self) -> Result<usize, Box<dyn Error>> {
        type GetCurrent = unsafe extern "C" fn(*mut *mut c_void) -> c_uint;
        // SAFETY: the type is cuda.h's.
        let get_current: GetCurrent = unsafe { self.function("cuCtxGetCurrent") }?;
        let mut context = ptr::null_mut();
        // SAFETY: the call writes `context`, which outlives it.
        check("cuCtxGetCurrent", unsafe { get_current(&raw mut context) })?;
        Ok(context.addr())
    }

    /// Creates a stream on the current device, for the rest of the process. The default stream does not wait for it.
    pub(crate) fn create_stream(&self) -> Result<Stream, Box<dyn Error>> {
        const NON_BLOCKING: c_uint = 1;
        self.create_stream_with(NON_BLOCKING)
    }

    /// Creates a stream with the driver's flags.
    pub(crate) fn create_stream_with(&self, flags: c_uint) -> Result<Stream, Box<dyn Error>> {
        type Create = unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_uint;
        // SAFETY: the type is cuda.h's.
        let create: Create = unsafe { self.function("cuStreamCreate") }?;
        let mut stream = ptr::null_mut();
        // SAFETY: the call writes `stream`, which outlives it.
        check("cuStreamCreate", unsafe { create(&raw mut stream, flags) })?;
        Ok(Stream(stream.expose_provenance() as u64))
    }

    /// Begins a capture in global mode, which forbids unsafe calls in every thread.
    pub(crate) fn begin_capture(&self, stream: Stream) -> Answer {
        const GLOBAL: c_uint = 0;
        type Begin = unsafe extern "C" fn(*mut c_void, c_uint) -> c_uint;
        // SAFETY: the type is cuda.h's.
        let begin: Begin = unsafe { self.function("cuStreamBeginCapture_v2") }?;
        // SAFETY: the stream exists.
        check("cuStreamBeginCapture_v2", unsafe {
            begin(raw(stream), GLOBAL)
        })
    }

    /// Ends a capture. Fails if it was invalidated. The graph is not destroyed.
    pub(crate) fn end_capture(&self, stream: Stream) -> Answer {
        type End = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_uint;
        // SAFETY: the type is cuda.h's.
        let end: End = unsafe { self.function("cuStreamEndCapture") }?;
        let mut graph = ptr::null_mut();
        // SAFETY: 1. the stream exists. 2. The call writes `graph`, which outlives it.
        check("cuStreamEndCapture", unsafe {
            end(raw(stream), &raw mut graph)
        })
    }
}

fn check(call: &str, result: c_uint) -> Answer {
    match result {
        0 => Ok(()),
        code => Err(format!("{call} failed with error {code}").into()),
    }
}

fn raw(stream: Stream) -> *mut c_void {
    ptr::with_exposed_provenance_mut(usize::try_from(stream.0).expect("64 bits"))
}
