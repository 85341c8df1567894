//! The thread state that driver calls depend on: the current context and the capture mode. Both are changed for the
//! duration of a call and restored afterwards.

use std::marker::PhantomData;
use std::ptr;

use lowtide_core::DriverError;

use crate::device::Device;
use crate::library::{Library, call};
use crate::sys::{CUcontext, CUresult, CUstream, CUstreamCaptureMode};

/// A device's primary context, which the CUDA runtime and so PyTorch use.
#[derive(Debug)]
pub(crate) struct PrimaryContext {
    device: Device,
    raw: CUcontext,
}

// SAFETY: contexts belong to the process, and any thread may use them.
unsafe impl Send for PrimaryContext {}
// SAFETY: as above; it is never modified.
unsafe impl Sync for PrimaryContext {}

impl PrimaryContext {
    /// Retains the device's primary context and creates it if it does not exist. Creation takes some tenths of a
    /// second and some hundred MiB of device memory.
    pub(crate) fn retain(device: Device) -> Result<PrimaryContext, DriverError> {
        let mut raw = ptr::null_mut();
        let library = device.library();
        // SAFETY: the call writes `raw`, which outlives it.
        unsafe {
            call!(
                library,
                cuDevicePrimaryCtxRetain(&raw mut raw, device.raw())
            )
        }?;
        Ok(PrimaryContext { device, raw })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn raw(&self) -> CUcontext {
        self.raw
    }

    /// Prepares a call that allocates or releases memory. PyTorch relaxes the capture mode only around
    /// `cudaMalloc`, but a capture in one thread must not keep other threads from releasing memory either.
    pub(crate) fn enter_relaxed(&self) -> Result<(RelaxedCapture, EnteredContext), DriverError> {
        Ok((self.device.library().relax_capture()?, self.enter()?))
    }

    /// Makes the context current in this thread until the returned guard is dropped.
    #[inline]
    pub(crate) fn enter(&self) -> Result<EnteredContext, DriverError> {
        // SAFETY: the context is held by `self`.
        unsafe { self.device.library().enter(self.raw) }
    }

    /// Makes the context current in this thread if the thread has no current context.
    pub(crate) fn make_current_if_none(&self) -> Result<(), DriverError> {
        let library = self.device.library();
        if library.current_context()?.is_null() {
            // SAFETY: the context is held by `self`.
            unsafe { call!(library, cuCtxPushCurrent_v2(self.raw)) }?;
        }
        Ok(())
    }

    /// Returns the context of an existing stream. For a default stream, this is the context in `self`.
    pub(crate) fn of_stream(&self, stream: CUstream) -> Result<CUcontext, DriverError> {
        let _scope = self.enter()?;
        let mut context = ptr::null_mut();
        // SAFETY: 1. the stream exists. 2. The call writes `context`, which outlives it.
        unsafe {
            call!(
                self.device.library(),
                cuStreamGetCtx(stream, &raw mut context)
            )
        }?;
        Ok(context)
    }

    /// Gives work in this context access to memory allocated in `owner`'s context. Repeating the call changes
    /// nothing.
    pub(crate) fn enable_peer(&self, owner: &PrimaryContext) -> Result<(), DriverError> {
        let _scope = self.enter()?;
        let library = self.device.library();
        // SAFETY: `owner` holds its context.
        match unsafe { (library.functions.cuCtxEnablePeerAccess)(owner.raw, 0) } {
            CUresult::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            result => library.check("cuCtxEnablePeerAccess", result),
        }
    }

    /// Waits for all work of this context.
    fn synchronize(&self) -> Result<(), DriverError> {
        let _scope = self.enter()?;
        // SAFETY: takes nothing.
        unsafe { call!(self.device.library(), cuCtxSynchronize()) }
    }
}

impl Device {
    /// Waits for all work of the device, including work of other threads and of unknown streams. Needs no
    /// [`CudaDriver`](crate::CudaDriver), so other threads can use a shared one meanwhile. If the device has no
    /// primary context, this creates one for the duration of the call.
    ///
    /// # Errors
    ///
    /// The driver's error if the work failed, or if a stream of the device is being captured. In the latter case
    /// the call invalidates the capture.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _scope = self.library().relax_capture()?;
        PrimaryContext::retain(self.clone())?.synchronize()
    }
}

impl Library {
    /// Lets this thread make calls that would invalidate a graph capture, until the returned guard is dropped.
    ///
    /// By default, the driver refuses such calls while any thread captures, and invalidates the capture: it cannot
    /// know whether the captured work depends on them. Calls that allocate or release memory are safe, because they
    /// add no node to the graph.
    ///
    /// # Errors
    ///
    /// The driver's error.
    #[inline]
    pub fn relax_capture(&self) -> Result<RelaxedCapture, DriverError> {
        let mut mode = CUstreamCaptureMode::RELAXED;
        // SAFETY: the call reads and writes `mode`, which outlives it.
        unsafe { call!(self, cuThreadExchangeStreamCaptureMode(&raw mut mode)) }?;
        Ok(RelaxedCapture {
            exchange: self.functions.cuThreadExchangeStreamCaptureMode,
            previous: mode,
            stays_in_thread: PhantomData,
        })
    }

    /// Returns the context that is current in this thread, or null if there is none.
    #[inline]
    pub(crate) fn current_context(&self) -> Result<CUcontext, DriverError> {
        let mut current = ptr::null_mut();
        // SAFETY: the call writes `current`, which outlives it.
        unsafe { call!(self, cuCtxGetCurrent(&raw mut current)) }?;
        Ok(current)
    }

    /// Makes a context current in this thread until the returned guard is dropped.
    ///
    /// If the context is already current, as in PyTorch's threads, this takes one call that reads a thread-local
    /// variable. Otherwise the context is pushed and later popped, not set: the program decides which device is
    /// current.
    ///
    /// # Safety
    ///
    /// The context must exist.
    #[inline]
    pub(crate) unsafe fn enter(&self, context: CUcontext) -> Result<EnteredContext, DriverError> {
        if self.current_context()? == context {
            return Ok(EnteredContext {
                pop: None,
                stays_in_thread: PhantomData,
            });
        }
        // SAFETY: the context exists, by the contract of this function.
        unsafe { call!(self, cuCtxPushCurrent_v2(context)) }?;
        Ok(EnteredContext {
            pop: Some(self.functions.cuCtxPopCurrent_v2),
            stays_in_thread: PhantomData,
        })
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // SAFETY: the context was retained once for `self`, and is not used after this.
        let released = unsafe {
            call!(
                self.device.library(),
                cuDevicePrimaryCtxRelease_v2(self.device.raw())
            )
        };
        // When the process exits, the driver and everything in it may be gone before this runs.
        drop(released);
    }
}

/// A guard that keeps a context current in this thread.
#[must_use]
#[derive(Debug)]
pub(crate) struct EnteredContext {
    /// The function that pops the context, or `None` if it was current before.
    pop: Option<unsafe extern "C" fn(*mut CUcontext) -> CUresult>,
    /// The current context belongs to a thread.
    stays_in_thread: PhantomData<*const ()>,
}

impl Drop for EnteredContext {
    #[inline]
    fn drop(&mut self) {
        if let Some(pop) = self.pop {
            let mut popped = ptr::null_mut();
            // The call fails only if the driver has shut down. Then there is nothing to restore.
            // SAFETY: 1. the call writes `popped`, which outlives it. 2. It pops what `enter` pushed in this
            // thread, because guards are nested.
            unsafe { pop(&raw mut popped) };
        }
    }
}

/// A guard from [`Library::relax_capture`](crate::Library::relax_capture): while it exists, this thread may make
/// calls that would invalidate a graph capture.
#[must_use = "the thread's mode is put back when this is dropped"]
#[derive(Debug)]
pub struct RelaxedCapture {
    exchange: unsafe extern "C" fn(*mut CUstreamCaptureMode) -> CUresult,
    previous: CUstreamCaptureMode,
    /// The capture mode belongs to a thread.
    stays_in_thread: PhantomData<*const ()>,
}

impl Drop for RelaxedCapture {
    #[inline]
    fn drop(&mut self) {
        // The call fails only if the driver has shut down. Then there is nothing to restore.
        // SAFETY: the call reads and writes `previous`, which outlives it.
        unsafe { (self.exchange)(&raw mut self.previous) };
    }
}
