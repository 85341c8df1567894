//! [`CudaDriver`]: the calls of [`Driver`] on one device.

use std::collections::{BTreeMap, BTreeSet};
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lowtide_core::{
    Bytes, CapturePoint, DeviceAddress, Driver, DriverError, EventHandle, GraphNode, Handle,
    MemoryInfo, Stream,
};

use crate::context::{EnteredContext, PrimaryContext, RelaxedCapture};
use crate::device::Device;
use crate::held::HeldRange;
use crate::library::{Library, call};
use crate::physical::PhysicalMemory;
use crate::sys::{
    CU_EVENT_DISABLE_TIMING, CUevent, CUmemAccessDesc, CUmemAccessFlags, CUresult, CUstream,
};

/// `cudaStreamPerThread`: another stream in each thread.
const PER_THREAD: Stream = Stream(2);

/// One device's driver.
///
/// Every call except [`CudaDriver::make_current_if_none`] restores the thread's current context and capture mode.
/// Calls may therefore come from any thread, whichever device that thread uses. Calls that allocate or release
/// memory neither fail during a graph capture nor invalidate it.
///
/// As the contract of [`Driver`] says, nothing is validated here: the calls report what the device answers.
#[derive(Debug)]
pub struct CudaDriver {
    pub(crate) context: PrimaryContext,
    /// `None` if the device does not support virtual memory.
    pub(crate) physical: Option<PhysicalMemory>,
    /// The devices with access to mapped memory: this device first, then its peers.
    pub(crate) access: Vec<CUmemAccessDesc>,
    /// The mapped bytes of ranges from other processes, by their starts.
    pub(crate) imported: BTreeMap<DeviceAddress, Bytes>,
    /// The ranges that the driver refused to release.
    pub(crate) abandoned: Vec<HeldRange>,
    /// The streams that exist until the process ends, beside the default stream.
    kept_streams: BTreeSet<Stream>,
    start: Instant,
    /// Released events, kept for reuse: creating an event costs several times as much as recording one.
    idle_events: Vec<CUevent>,
    /// Recorded events that belong to other devices' contexts.
    foreign_events: Vec<CUevent>,
}

// SAFETY: 1. contexts and events belong to the process, and any thread may use them. 2. The one other
// pointer, in the properties of physical memory, is null.
unsafe impl Send for CudaDriver {}

impl CudaDriver {
    /// Returns the driver of a device.
    ///
    /// Creates the device's primary context if it does not exist. Determines once which kind of physical memory
    /// works on this machine, by mapping one page of each kind until one works.
    ///
    /// # Errors
    ///
    /// The driver's error.
    ///
    /// # Safety
    ///
    /// No type can check the following, so it must hold as long as the returned driver exists:
    ///
    /// - Addresses, handles, events and nodes passed to it came from it and have not been released.
    /// - Streams passed to it are the default streams, or exist in the device's primary context.
    /// - That context is not reset.
    pub unsafe fn new(device: Device) -> Result<CudaDriver, DriverError> {
        let mut driver = CudaDriver {
            access: vec![read_write(&device)],
            context: PrimaryContext::retain(device)?,
            physical: None,
            imported: BTreeMap::new(),
            abandoned: Vec::new(),
            kept_streams: BTreeSet::new(),
            start: Instant::now(),
            idle_events: Vec::new(),
            foreign_events: Vec::new(),
        };
        driver.choose_physical_memory()?;
        Ok(driver)
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        self.context.device()
    }

    /// Makes the device's primary context current in this thread if the thread has none, as the CUDA runtime does.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn make_current_if_none(&self) -> Result<(), DriverError> {
        self.context.make_current_if_none()
    }

    /// Notes that a stream, which exists, is never destroyed before the process ends. Does nothing and returns `false` for a
    /// thread's own default stream: its number is another stream in each thread.
    pub fn keep_stream(&mut self, stream: Stream) -> bool {
        let is_one = stream != PER_THREAD && stream_handle("cuEventRecord", stream).is_ok();
        if is_one {
            self.kept_streams.insert(stream);
        }
        is_one
    }

    pub(crate) fn library(&self) -> &Library {
        self.context.device().library()
    }

    pub(crate) fn enter_relaxed(&self) -> Result<(RelaxedCapture, EnteredContext), DriverError> {
        self.context.enter_relaxed()
    }

    /// Returns an idle event, or a new one.
    fn take_event(&mut self) -> Result<CUevent, DriverError> {
        match self.idle_events.pop() {
            Some(event) => Ok(event),
            None => self.create_event(),
        }
    }

    /// Creates an event in the current context.
    fn create_event(&self) -> Result<CUevent, DriverError> {
        let mut event = ptr::null_mut();
        // SAFETY: the call writes `event`, which outlives it.
        unsafe {
            call!(
                self.library(),
                cuEventCreate(&raw mut event, CU_EVENT_DISABLE_TIMING)
            )
        }?;
        Ok(event)
    }

    /// Records an event in a stream of another device, with an event of that device's context: an event and its
    /// stream must have the same context. Returns `refusal`, the driver's error for an event of this device, if the
    /// stream is not another device's.
    #[cold]
    fn record_elsewhere(
        &mut self,
        stream: Stream,
        refusal: DriverError,
    ) -> Result<EventHandle, DriverError> {
        let context = match self.context.of_stream(raw_stream(stream)) {
            Ok(context) if context != self.context.raw() => context,
            _ => return Err(refusal),
        };
        let library = Arc::clone(self.device().library());
        // SAFETY: the stream exists, so its context does.
        let _scope = unsafe { library.enter(context) }?;
        let event = self.create_event()?;
        // SAFETY: 1. no one else uses the event. 2. The stream exists, by the contract of `new`.
        let recorded = unsafe { call!(&library, cuEventRecord(event, raw_stream(stream))) };
        if let Err(error) = recorded {
            self.destroy_event(event);
            return Err(error);
        }
        self.foreign_events.push(event);
        Ok(event_handle(event))
    }

    /// Destroys an event that no one uses.
    fn destroy_event(&self, event: CUevent) {
        // When the process exits, the driver and its events may be gone before this runs.
        // SAFETY: no one uses the event, by the contract of this function.
        let _ = unsafe { call!(self.library(), cuEventDestroy_v2(event)) };
    }
}

/// Returns the descriptor that gives a device read and write access.
pub(crate) fn read_write(device: &Device) -> CUmemAccessDesc {
    CUmemAccessDesc {
        location: device.location(),
        flags: CUmemAccessFlags::READ_WRITE,
    }
}

impl Driver for CudaDriver {
    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        let _scope = self.enter_relaxed()?;
        let mut address = 0;
        // SAFETY: the call writes `address`, which outlives it.
        unsafe {
            call!(
                self.library(),
                cuMemAlloc_v2(&raw mut address, host_size(size))
            )
        }?;
        Ok(DeviceAddress(address))
    }

    fn free(&mut self, address: DeviceAddress, _size: Bytes) -> Result<(), DriverError> {
        let _scope = self.enter_relaxed()?;
        self.retry_abandoned();
        // SAFETY: the address came from `allocate`, by the contract of `new`.
        unsafe { call!(self.library(), cuMemFree_v2(address.get())) }
    }

    fn supports_virtual_memory(&self) -> bool {
        self.physical.is_some()
    }

    fn granularity(&self) -> Bytes {
        // Without virtual memory nothing is mapped, but sizes may still be rounded to a card's usual granularity.
        self.physical
            .as_ref()
            .map_or(Bytes::mib(2), |physical| physical.granularity)
    }

    fn reserve(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError> {
        let _scope = self.enter_relaxed()?;
        let mut address = 0;
        // SAFETY: the call writes `address`, which outlives it.
        unsafe {
            call!(
                self.library(),
                cuMemAddressReserve(&raw mut address, host_size(size), 0, 0, 0)
            )
        }?;
        Ok(DeviceAddress(address))
    }

    fn unreserve(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        let _scope = self.enter_relaxed()?;
        // SAFETY: the range came from `reserve`, by the contract of `new`.
        unsafe {
            call!(
                self.library(),
                cuMemAddressFree(address.get(), host_size(size))
            )
        }
    }

    fn create(&mut self, size: Bytes) -> Result<Handle, DriverError> {
        let Some(physical) = &self.physical else {
            let call = "cuMemCreate";
            return Err(DriverError::Unsupported { call });
        };
        let _scope = self.enter_relaxed()?;
        let mut handle = 0;
        // SAFETY: the call reads the properties and writes `handle`; both outlive it.
        unsafe {
            call!(
                self.library(),
                cuMemCreate(
                    &raw mut handle,
                    host_size(size),
                    &raw const physical.properties,
                    0
                )
            )
        }?;
        Ok(Handle(handle))
    }

    fn release(&mut self, handle: Handle) -> Result<(), DriverError> {
        let _scope = self.enter_relaxed()?;
        self.retry_abandoned();
        // SAFETY: the handle came from `create` or `import`, by the contract of `new`.
        unsafe { call!(self.library(), cuMemRelease(handle.0)) }
    }

    fn map(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
        handle: Handle,
    ) -> Result<(), DriverError> {
        let _scope = self.enter_relaxed()?;
        // SAFETY: the range came from `reserve`, the handle from `create` or `import`, by the contract
        // of `new`.
        unsafe {
            call!(
                self.library(),
                cuMemMap(address.get(), host_size(size), 0, handle.0, 0)
            )
        }
    }

    fn set_access(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        self.grant(address, size, &self.access)
    }

    fn unmap(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        let _scope = self.enter_relaxed()?;
        // SAFETY: the range came from `reserve`, by the contract of `new`.
        unsafe { call!(self.library(), cuMemUnmap(address.get(), host_size(size))) }
    }

    fn record_event(&mut self, stream: Stream) -> Result<EventHandle, DriverError> {
        let _scope = self.context.enter()?;
        let handle = stream_handle("cuEventRecord", stream)?;
        let event = self.take_event()?;
        // SAFETY: 1. no one else uses the event. 2. The stream exists, by the contract of `new`.
        let recorded = unsafe { call!(self.library(), cuEventRecord(event, handle)) };
        match recorded {
            Ok(()) => Ok(event_handle(event)),
            Err(refusal) => {
                self.idle_events.push(event);
                self.record_elsewhere(stream, refusal)
            }
        }
    }

    fn query_event(&mut self, event: EventHandle) -> Result<bool, DriverError> {
        let _scope = self.enter_relaxed()?;
        let library = self.library();
        // SAFETY: the event came from `record_event`, by the contract of `new`.
        match unsafe { (library.functions.cuEventQuery)(raw_event(event)) } {
            CUresult::NOT_READY => Ok(false),
            result => library.check("cuEventQuery", result).map(|()| true),
        }
    }

    fn synchronize_event(&mut self, event: EventHandle) -> Result<(), DriverError> {
        let _scope = self.context.enter()?;
        // SAFETY: the event came from `record_event`, by the contract of `new`.
        unsafe { call!(self.library(), cuEventSynchronize(raw_event(event))) }
    }

    fn wait_event(&mut self, stream: Stream, event: EventHandle) -> Result<(), DriverError> {
        let _scope = self.context.enter()?;
        let (stream, event) = (
            stream_handle("cuStreamWaitEvent", stream)?,
            raw_event(event),
        );
        // SAFETY: stream and event exist, by the contract of `new`.
        unsafe { call!(self.library(), cuStreamWaitEvent(stream, event, 0)) }
    }

    fn release_event(&mut self, event: EventHandle) {
        let event = raw_event(event);
        let foreign = self.foreign_events.iter().position(|&known| known == event);
        match foreign {
            None => self.idle_events.push(event),
            Some(index) => {
                self.foreign_events.swap_remove(index);
                self.destroy_event(event);
            }
        }
    }

    fn synchronize_stream(&mut self, stream: Stream) -> Result<(), DriverError> {
        let Ok(stream) = stream_handle("cuStreamSynchronize", stream) else {
            return self.synchronize_device();
        };
        let _scope = self.context.enter()?;
        // SAFETY: the stream exists, by the contract of `new`.
        unsafe { call!(self.library(), cuStreamSynchronize(stream)) }
    }

    fn synchronize_device(&mut self) -> Result<(), DriverError> {
        let _scope = self.context.enter()?;
        // SAFETY: takes nothing.
        unsafe { call!(self.library(), cuCtxSynchronize()) }
    }

    fn is_kept(&self, stream: Stream) -> bool {
        stream == Stream::DEFAULT || self.kept_streams.contains(&stream)
    }

    fn capture_of(&mut self, stream: Stream) -> Option<u64> {
        self.capture_id(stream).ok().flatten()
    }

    fn is_in_capture(&mut self, stream: Stream) -> bool {
        self.concerns_capture(stream)
    }

    fn capture_point(&mut self, stream: Stream) -> Option<CapturePoint> {
        self.captured_place(stream).ok().flatten()
    }

    fn dependencies(&mut self, node: GraphNode) -> Vec<GraphNode> {
        self.direct_dependencies(node).unwrap_or_default()
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn memory_info(&mut self) -> Result<MemoryInfo, DriverError> {
        let _scope = self.context.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the call writes both numbers, which outlive it.
        unsafe {
            call!(
                self.library(),
                cuMemGetInfo_v2(&raw mut free, &raw mut total)
            )
        }?;
        Ok(MemoryInfo {
            free: Bytes(free as u64),
            total: Bytes(total as u64),
        })
    }
}

impl CudaDriver {
    /// Gives devices read and write access to a mapped range.
    pub(crate) fn grant(
        &self,
        address: DeviceAddress,
        size: Bytes,
        access: &[CUmemAccessDesc],
    ) -> Result<(), DriverError> {
        let _scope = self.enter_relaxed()?;
        // SAFETY: 1. the range came from `reserve`, by the contract of `new`. 2. The call reads
        // `access.len()` elements, which outlive it.
        unsafe {
            call!(
                self.library(),
                cuMemSetAccess(
                    address.get(),
                    host_size(size),
                    access.as_ptr(),
                    access.len()
                )
            )
        }
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        let Ok(_scope) = self.context.enter() else {
            return;
        };
        self.retry_abandoned();
        for &event in &self.idle_events {
            self.destroy_event(event);
        }
    }
}

/// Returns a size as a `usize`.
pub(crate) fn host_size(size: Bytes) -> usize {
    const {
        assert!(
            size_of::<usize>() == size_of::<u64>(),
            "CUDA's hosts have 64 bits"
        )
    };
    #[expect(clippy::cast_possible_truncation, reason = "checked in the line above")]
    let size = size.get() as usize;
    size
}

/// Returns the driver's handle of a stream: a pointer, and so even, or at most 2 for a default stream.
///
/// # Errors
///
/// [`DriverError::Unsupported`] for the number of a thread's own default stream, which the driver would take for a
/// pointer.
pub(crate) fn stream_handle(call: &'static str, stream: Stream) -> Result<CUstream, DriverError> {
    if stream.0 > 2 && stream.0 % 2 == 1 {
        return Err(DriverError::Unsupported { call });
    }
    Ok(raw_stream(stream))
}

/// Returns the stream with this number.
pub(crate) fn raw_stream(stream: Stream) -> CUstream {
    ptr::with_exposed_provenance_mut(host_size(Bytes(stream.0)))
}

/// Returns an event's number.
fn event_handle(event: CUevent) -> EventHandle {
    EventHandle(event.expose_provenance() as u64)
}

/// Returns the event with this number.
pub(crate) fn raw_event(event: EventHandle) -> CUevent {
    ptr::with_exposed_provenance_mut(host_size(Bytes(event.0)))
}
