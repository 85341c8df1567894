//! Finds the device whose primary context a thread or a stream uses, for callers that do not name a device.

use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use lowtide_core::{DriverError, Stream};

use crate::context::PrimaryContext;
use crate::driver::raw_stream;
use crate::library::{Library, call};
use crate::streams::CaptureStatus;
use crate::sys::{CUcontext, CUdeviceptr, CUstreamCaptureStatus};

/// The primary contexts that threads of this process have been found in. Each stays retained from then on, so that
/// its handle cannot become another context's unless the program resets the device.
#[derive(Debug)]
pub struct PrimaryContexts {
    library: Arc<Library>,
    /// Indexed by the device's number.
    devices: Box<[PerDevice]>,
}

#[derive(Debug, Default)]
struct PerDevice {
    context: OnceLock<PrimaryContext>,
    /// A small allocation that a wait for the device frees during a capture.
    spare: Mutex<Option<CUdeviceptr>>,
}

// SAFETY: the pointers in it are handles of contexts, which belong to the process; any thread may use them.
unsafe impl Send for PrimaryContexts {}
// SAFETY: as above, and what changes is behind `OnceLock` or `Mutex`.
unsafe impl Sync for PrimaryContexts {}

impl PrimaryContexts {
    /// Returns an empty list for the driver's devices.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn new(library: Arc<Library>) -> Result<PrimaryContexts, DriverError> {
        let count = library.device_count()?;
        Ok(PrimaryContexts {
            library,
            devices: (0..count).map(|_| PerDevice::default()).collect(),
        })
    }

    /// Returns the number of the device whose primary context is current in this thread. Returns `None` if the
    /// thread has no context, or one that the program created itself. Creates no context. Takes one driver call if
    /// the context was found before.
    ///
    /// # Errors
    ///
    /// The driver's error.
    #[inline]
    pub fn current(&self) -> Result<Option<u32>, DriverError> {
        self.device_of(self.library.current_context()?)
    }

    /// Returns the number of the device whose primary context a stream belongs to. Returns `None` for another
    /// context.
    ///
    /// # Errors
    ///
    /// The driver's error.
    ///
    /// # Safety
    ///
    /// The stream must exist. A default stream is the current context's.
    pub unsafe fn of_stream(&self, stream: Stream) -> Result<Option<u32>, DriverError> {
        let mut context = ptr::null_mut();
        // SAFETY: 1. the stream exists, by the contract of this function. 2. The call writes `context`,
        // which outlives it.
        unsafe {
            call!(
                &self.library,
                cuStreamGetCtx(raw_stream(stream), &raw mut context)
            )
        }?;
        self.device_of(context)
    }

    /// Returns the capture status of a stream.
    ///
    /// # Errors
    ///
    /// The driver's error. The default stream gives an error while another stream is being captured.
    ///
    /// # Safety
    ///
    /// As for [`PrimaryContexts::of_stream`].
    pub unsafe fn capture_status(&self, stream: Stream) -> Result<CaptureStatus, DriverError> {
        let mut status = CUstreamCaptureStatus::NONE;
        // SAFETY: 1. the stream exists, by the contract of this function. 2. The call writes `status`,
        // which outlives it.
        unsafe {
            call!(
                &self.library,
                cuStreamIsCapturing(raw_stream(stream), &raw mut status)
            )
        }?;
        Ok(CaptureStatus::from_raw(status))
    }

    /// Waits for all work of a stream.
    ///
    /// # Errors
    ///
    /// The driver's error if the work failed or the stream is being captured.
    ///
    /// # Safety
    ///
    /// As for [`PrimaryContexts::of_stream`].
    pub unsafe fn wait_for_stream(&self, stream: Stream) -> Result<(), DriverError> {
        // SAFETY: the stream exists, by the contract of this function.
        unsafe { call!(&self.library, cuStreamSynchronize(raw_stream(stream))) }
    }

    /// Waits for all work of a device, as `cuMemFree` does: in every stream, from every thread. Does nothing if the
    /// device's primary context is unknown. `is_capturing` says whether a stream of the process may be under
    /// capture.
    ///
    /// With `is_capturing`, this frees a small allocation and allocates it again, because `cuCtxSynchronize` would
    /// always invalidate a capture. It takes as long as these two calls, and fails and invalidates the capture
    /// where they would.
    ///
    /// # Errors
    ///
    /// The driver's error if the work failed or is being captured.
    pub fn wait(&self, device: u32, is_capturing: bool) -> Result<(), DriverError> {
        let Some((context, device)) = self.find(device) else {
            return Ok(());
        };
        let _scope = context.enter()?;
        if is_capturing {
            return self.free_something(device);
        }
        // SAFETY: takes nothing.
        unsafe { call!(&self.library, cuCtxSynchronize()) }
    }

    /// Allocates the small allocation that [`PrimaryContexts::wait`] frees during a capture, unless it exists. It is
    /// allocated in advance because the device may be full during the capture. Does nothing if the device's primary
    /// context is unknown. Invalidates no capture.
    ///
    /// # Errors
    ///
    /// The driver's error. The wait then tries to allocate.
    pub fn keep_spare(&self, device: u32) -> Result<(), DriverError> {
        let Some((context, device)) = self.find(device) else {
            return Ok(());
        };
        let mut spare = device.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.is_none() {
            let _scope = context.enter_relaxed()?;
            *spare = Some(self.allocate()?);
        }
        Ok(())
    }

    /// Frees the spare allocation of the current context, and allocates it again.
    #[cold]
    fn free_something(&self, device: &PerDevice) -> Result<(), DriverError> {
        let spare = || device.spare.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = spare().take();
        let address = taken.map_or_else(|| self.allocate(), Ok)?;
        let freed = self.free(address);
        let next = match &freed {
            Ok(()) => self
                .library
                .relax_capture()
                .and_then(|_relaxed| self.allocate())
                .ok(),
            Err(_) => Some(address),
        };
        // Another thread may have stored one meanwhile.
        if let Some(extra) = next.and_then(|next| spare().replace(next)) {
            let _relaxed = self.library.relax_capture()?;
            self.free(extra)?;
        }
        freed
    }

    fn allocate(&self) -> Result<CUdeviceptr, DriverError> {
        let mut address = 0;
        // SAFETY: the call writes `address`, which outlives it.
        unsafe { call!(&self.library, cuMemAlloc_v2(&raw mut address, 1)) }?;
        Ok(address)
    }

    /// Frees an address that [`PrimaryContexts::allocate`] returned.
    fn free(&self, address: CUdeviceptr) -> Result<(), DriverError> {
        // SAFETY: `allocate` returned the address, and only the caller uses it.
        unsafe { call!(&self.library, cuMemFree_v2(address)) }
    }

    #[inline]
    fn device_of(&self, context: CUcontext) -> Result<Option<u32>, DriverError> {
        if context.is_null() {
            return Ok(None);
        }
        let is_it = |device: &PerDevice| {
            let known = device.context.get();
            known.is_some_and(|known| known.raw() == context)
        };
        match (0..).zip(&self.devices).find(|(_, device)| is_it(device)) {
            Some((device, _)) => Ok(Some(device)),
            None => self.meet(context),
        }
    }

    /// Checks whether an existing context is its device's primary context, and remembers it if so.
    #[cold]
    fn meet(&self, context: CUcontext) -> Result<Option<u32>, DriverError> {
        // SAFETY: the context exists: the driver just returned it.
        let _scope = unsafe { self.library.enter(context) }?;
        let mut device = 0;
        // SAFETY: the call writes `device`, which outlives it.
        unsafe { call!(&self.library, cuCtxGetDevice(&raw mut device)) }?;
        let number = u32::try_from(device).ok();
        // A context that the program created itself gets here at every call. For a primary one, another thread may
        // have remembered it meanwhile.
        if let Some((known, _)) = number.and_then(|number| self.find(number)) {
            return Ok(number.filter(|_| known.raw() == context));
        }
        let (mut flags, mut is_active) = (0, 0);
        // SAFETY: the call writes both numbers, which outlive it.
        unsafe {
            call!(
                &self.library,
                cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut is_active)
            )
        }?;
        let Some(number) = number.filter(|_| is_active != 0) else {
            return Ok(None);
        };
        let primary = PrimaryContext::retain(self.library.device(number)?)?;
        if primary.raw() != context {
            return Ok(None);
        }
        if let Some(device) = self.device(number) {
            // Another thread may have been faster; this reference is then released.
            drop(device.context.set(primary));
        }
        Ok(Some(number))
    }

    /// Returns a device whose primary context is known.
    fn find(&self, device: u32) -> Option<(&PrimaryContext, &PerDevice)> {
        let device = self.device(device)?;
        Some((device.context.get()?, device))
    }

    fn device(&self, number: u32) -> Option<&PerDevice> {
        self.devices.get(usize::try_from(number).ok()?)
    }
}
