//! The state that calls depend on without naming it: a thread's current context and its capture mode.
//! Both are changed for the time of a call, and put back.

use std::marker::PhantomData;
use std::ptr;

use lowtide_core::DriverError;

use crate::device::Device;
use crate::library::{Library, call};
use crate::sys::{CUcontext, CUresult, CUstream, CUstreamCaptureMode};

/// A device's primary context: the one that CUDA's runtime, and so PyTorch, uses.
#[derive(Debug)]
pub(crate) struct PrimaryContext {
    device: Device,
    raw: CUcontext,
}

// SAFETY: contexts belong to the process, and any thread may use them.
unsafe impl Send for PrimaryContext {}
// SAFETY: as above; nothing of it changes.
unsafe impl Sync for PrimaryContext {}

impl PrimaryContext {
    /// Holds the device's primary context, which is made if there is none: that takes some tenths of a
    /// second and some hundred MiB of the device.
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

    /// Prepares a call for memory: PyTorch relaxes captures around `cudaMalloc` alone, but a capture in
    /// one thread must not keep others from giving memory back either.
    pub(crate) fn enter_relaxed(&self) -> Result<(RelaxedCapture, EnteredContext), DriverError> {
        Ok((self.device.library().relax_capture()?, self.enter()?))
    }

    /// Makes the context current in this thread until the answer is dropped.
    #[inline]
    pub(crate) fn enter(&self) -> Result<EnteredContext, DriverError> {
        // SAFETY: the context is held by `self`.
        unsafe { self.device.library().enter(self.raw) }
    }

    /// Makes the context current in this thread if none is.
    pub(crate) fn make_current_if_none(&self) -> Result<(), DriverError> {
        let library = self.device.library();
        if library.current_context()?.is_null() {
            // SAFETY: the context is held by `self`.
            unsafe { call!(library, cuCtxPushCurrent_v2(self.raw)) }?;
        }
        Ok(())
    }

    /// Returns the context of a stream, which exists; for the default streams this one.
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

    /// Lets work in this context use what is allocated in that of `owner`. Doing it again changes nothing.
    pub(crate) fn enable_peer(&self, owner: &PrimaryContext) -> Result<(), DriverError> {
        let _scope = self.enter()?;
        let library = self.device.library();
        // SAFETY: `owner` holds its context.
        match unsafe { (library.functions.cuCtxEnablePeerAccess)(owner.raw, 0) } {
            CUresult::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            result => library.check("cuCtxEnablePeerAccess", result),
        }
    }

    /// Waits for all work of the context.
    fn synchronize(&self) -> Result<(), DriverError> {
        let _scope = self.enter()?;
        // SAFETY: takes nothing.
        unsafe { call!(self.device.library(), cuCtxSynchronize()) }
    }
}

impl Device {
    /// Waits for all work of the device, that of other threads and of streams unknown here included. Needs
    /// no [`CudaDriver`](crate::CudaDriver), so that whoever shares one need not keep it from others
    /// meanwhile; without one this makes the device's primary context for the time of the call.
    ///
    /// # Errors
    ///
    /// What the driver says, if the work failed, or a stream of the device is being captured: that spoils
    /// the capture.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _scope = self.library().relax_capture()?;
        PrimaryContext::retain(self.clone())?.synchronize()
    }
}

impl Library {
    /// Lets this thread make calls that would spoil a graph capture, until the answer is dropped.
    ///
    /// By default the driver refuses them, and makes the capture invalid, while any thread captures: it
    /// cannot know that the captured work does not need them. Calls for memory do not: the capture gets
    /// no node from them.
    ///
    /// # Errors
    ///
    /// What the driver says.
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

    /// Returns the context that is current in this thread; null where none is.
    #[inline]
    pub(crate) fn current_context(&self) -> Result<CUcontext, DriverError> {
        let mut current = ptr::null_mut();
        // SAFETY: the call writes `current`, which outlives it.
        unsafe { call!(self, cuCtxGetCurrent(&raw mut current)) }?;
        Ok(current)
    }

    /// Makes a context current in this thread until the answer is dropped.
    ///
    /// Where it is current already, as in PyTorch's threads, this is one call that reads a variable of
    /// the thread. Where it is not, it is pushed and popped and not set: which device is current is the
    /// program's business.
    ///
    /// # Safety
    ///
    /// The context exists.
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
        // At the end of a process the driver may be gone before us, and everything with it.
        drop(released);
    }
}

/// A context is current in this thread.
#[must_use]
#[derive(Debug)]
pub(crate) struct EnteredContext {
    /// What takes it away again, if it was not current before.
    pop: Option<unsafe extern "C" fn(*mut CUcontext) -> CUresult>,
    /// What is current belongs to a thread.
    stays_in_thread: PhantomData<*const ()>,
}

impl Drop for EnteredContext {
    #[inline]
    fn drop(&mut self) {
        if let Some(pop) = self.pop {
            let mut popped = ptr::null_mut();
            // It fails only if the driver has shut down, and then there is nothing to put back.
            // SAFETY: 1. the call writes `popped`, which outlives it. 2. What it takes is what `enter`
            // pushed in this thread, as calls are nested.
            unsafe { pop(&raw mut popped) };
        }
    }
}

/// This thread may make calls that would spoil a graph capture; from
/// [`Library::relax_capture`](crate::Library::relax_capture).
#[must_use = "the thread's mode is put back when this is dropped"]
#[derive(Debug)]
pub struct RelaxedCapture {
    exchange: unsafe extern "C" fn(*mut CUstreamCaptureMode) -> CUresult,
    previous: CUstreamCaptureMode,
    /// The mode belongs to a thread.
    stays_in_thread: PhantomData<*const ()>,
}

impl Drop for RelaxedCapture {
    #[inline]
    fn drop(&mut self) {
        // It fails only if the driver has shut down, and then there is nothing to put back.
        // SAFETY: the call reads and writes `previous`, which outlives it.
        unsafe { (self.exchange)(&raw mut self.previous) };
    }
}
