//! The interface between the allocator and a device. The allocator reaches the device only through it.

use std::fmt;
use std::time::Duration;

use crate::units::{Bytes, DeviceAddress, Stream};

/// Physical memory from [`Driver::create`], mapped or not.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Handle(pub u64);

/// An event in a stream, from [`Driver::record_event`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct EventHandle(pub u64);

/// A node of a graph that is being captured.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GraphNode(pub u64);

/// The position of a captured stream's next work in the graph, from [`Driver::capture_point`].
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct CapturePoint {
    /// The number of the capture, unique in the process.
    pub capture: u64,
    /// The nodes that the next work depends on directly; empty at the beginning of the graph.
    pub after: Vec<GraphNode>,
}

/// How much memory a device has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryInfo {
    /// Bytes that the driver can still allocate.
    pub free: Bytes,
    /// All bytes of the device.
    pub total: Bytes,
}

impl MemoryInfo {
    /// Returns the limit for a fraction of the device's memory: `None`, no limit, for 1 or more.
    pub fn limit(self, fraction: f64) -> Option<Bytes> {
        (fraction < 1.0).then(|| self.total.scale(fraction))
    }

    /// Returns how many bytes are missing in the 32nd of the device's memory that stays free for other programs.
    pub fn missing_free(self) -> Bytes {
        const PART: u64 = 32;
        Bytes(self.total.get() / PART).saturating_sub(self.free)
    }
}

/// The operations of one device that the allocator needs.
///
/// The allocator keeps the rules of the device's virtual memory: it maps only addresses that it reserved, maps
/// whole handles, and unmaps each once. An implementation for a real device reports the device's errors and does
/// not check these rules again; the simulator checks all of them.
///
/// A call that returns an error has changed nothing. Sizes given to `create`, `map` and `unmap` are multiples of
/// [`Driver::granularity`].
pub trait Driver {
    /// Returns new memory of at least `size` bytes, readable and writable by the device
    /// (`cudaMalloc`).
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfMemory`] if the device has too little memory left.
    fn allocate(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError>;

    /// Frees memory from [`Driver::allocate`] (`cudaFree`). Waits for the device's work.
    ///
    /// # Errors
    ///
    /// The driver's error; the memory is then still allocated.
    fn free(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError>;

    /// Returns whether the calls from [`Driver::reserve`] to [`Driver::unmap`] work. Must not change
    /// for one instance.
    fn supports_virtual_memory(&self) -> bool;

    /// Returns the unit of physical memory and of mapping, in bytes: 2 MiB on NVIDIA cards. Must not
    /// change for one instance.
    fn granularity(&self) -> Bytes;

    /// Returns the start of `size` bytes of unused addresses (`cuMemAddressReserve`).
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfMemory`] if no such range is left.
    fn reserve(&mut self, size: Bytes) -> Result<DeviceAddress, DriverError>;

    /// Releases a whole range from [`Driver::reserve`] (`cuMemAddressFree`). Nothing may be mapped in it.
    ///
    /// # Errors
    ///
    /// The driver's error; the range is then still reserved.
    fn unreserve(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError>;

    /// Returns new physical memory of `size` bytes, mapped nowhere (`cuMemCreate`).
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfMemory`] if the device has too little memory left.
    fn create(&mut self, size: Bytes) -> Result<Handle, DriverError>;

    /// Releases physical memory (`cuMemRelease`). It is freed on the device once no address maps it.
    ///
    /// # Errors
    ///
    /// The driver's error; the handle is then still valid.
    fn release(&mut self, handle: Handle) -> Result<(), DriverError>;

    /// Maps all of a handle, `size` bytes, at `address` (`cuMemMap`). It may be used after
    /// [`Driver::set_access`]. A handle may be mapped at several addresses, which then show the same bytes; it counts
    /// once against the device's memory.
    ///
    /// # Errors
    ///
    /// The driver's error; the range is then not mapped.
    fn map(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
        handle: Handle,
    ) -> Result<(), DriverError>;

    /// Makes a mapped range readable and writable by the device (`cuMemSetAccess`).
    ///
    /// # Errors
    ///
    /// The driver's error; the range's access is then what it was.
    fn set_access(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError>;

    /// Unmaps a range that holds whole handles (`cuMemUnmap`). Does not wait for the device's work.
    ///
    /// # Errors
    ///
    /// The driver's error; the range is then still mapped.
    fn unmap(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError>;

    /// Returns an event that passes when the work now in `stream` is done (`cudaEventRecord`).
    ///
    /// # Errors
    ///
    /// The driver's error; no event exists then.
    fn record_event(&mut self, stream: Stream) -> Result<EventHandle, DriverError>;

    /// Returns whether the event has passed (`cudaEventQuery`). Not allowed while a stream is being
    /// captured.
    ///
    /// # Errors
    ///
    /// The driver's error. An event that has not passed is not an error.
    fn query_event(&mut self, event: EventHandle) -> Result<bool, DriverError>;

    /// Waits until the event has passed (`cudaEventSynchronize`).
    ///
    /// # Errors
    ///
    /// The driver's error; the event is then still valid.
    fn synchronize_event(&mut self, event: EventHandle) -> Result<(), DriverError>;

    /// Makes work that is queued in `stream` from now on wait for the event (`cudaStreamWaitEvent`). The call
    /// itself does not wait.
    ///
    /// # Errors
    ///
    /// The driver's error; the stream then waits for no further event.
    fn wait_event(&mut self, stream: Stream, event: EventHandle) -> Result<(), DriverError>;

    /// Destroys an event. This cannot fail: if the driver refuses, it keeps the event.
    fn release_event(&mut self, event: EventHandle);

    /// Waits for the work queued in `stream`, which must exist (`cudaStreamSynchronize`). For the number of a thread's
    /// own default stream, waits for all work of the device.
    ///
    /// # Errors
    ///
    /// The driver's error.
    fn synchronize_stream(&mut self, stream: Stream) -> Result<(), DriverError>;

    /// Waits until all work of the device is done (`cudaDeviceSynchronize`), also in streams that were destroyed.
    ///
    /// # Errors
    ///
    /// The driver's error.
    fn synchronize_device(&mut self) -> Result<(), DriverError>;

    /// Returns whether `stream` exists until the process ends, like the default stream. Driver calls for such a stream
    /// are always safe.
    fn is_kept(&self, stream: Stream) -> bool {
        stream == Stream::DEFAULT
    }

    /// Returns the number of the capture that `stream` is in (`cudaStreamGetCaptureInfo`). `None` if the stream is
    /// not being captured or the device does not report it.
    fn capture_of(&mut self, _stream: Stream) -> Option<u64> {
        None
    }

    /// Returns whether an event in `stream`, which must exist, would break a capture: the stream is captured, or its
    /// work would wait for a capture. False for the number of a thread's own default stream.
    fn is_in_capture(&mut self, stream: Stream) -> bool {
        self.capture_of(stream).is_some()
    }

    /// Returns the position of the next work of `stream` in the graph that it is captured into; `None` as for
    /// [`Driver::capture_of`]. No other thread may queue work in the stream meanwhile.
    fn capture_point(&mut self, _stream: Stream) -> Option<CapturePoint> {
        None
    }

    /// Returns the direct dependencies of a graph's node while the graph is being captured; empty if the device
    /// does not report them (`cudaGraphNodeGetDependencies`).
    fn dependencies(&mut self, _node: GraphNode) -> Vec<GraphNode> {
        Vec::new()
    }

    /// Returns the time since a fixed moment.
    fn now(&self) -> Duration;

    /// Returns how much memory the device has (`cudaMemGetInfo`).
    ///
    /// # Errors
    ///
    /// The driver's error.
    fn memory_info(&mut self) -> Result<MemoryInfo, DriverError>;
}

/// Why a call to the device failed.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum DriverError {
    /// The device has too little memory left. The allocator releases cached memory and tries again.
    OutOfMemory,
    /// The device or its driver cannot do this.
    Unsupported {
        /// What was called.
        call: &'static str,
    },
    /// Any other error. After most of them the device's context is lost.
    Failed {
        /// What was called.
        call: &'static str,
        /// The driver's error number.
        code: i32,
        /// The driver's error message.
        message: String,
    },
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DriverError::OutOfMemory => write!(f, "the device is out of memory"),
            DriverError::Unsupported { call } => {
                write!(f, "{call} is not supported by this device or its driver")
            }
            DriverError::Failed {
                call,
                code,
                message,
            } => {
                write!(f, "{call} failed with error {code}: {message}")
            }
        }
    }
}

impl std::error::Error for DriverError {}

/// Returns `None` if the driver is out of memory, which callers treat as an answer and not as an error.
pub(crate) fn unless_out_of_memory<T>(
    result: Result<T, DriverError>,
) -> Result<Option<T>, DriverError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(DriverError::OutOfMemory) => Ok(None),
        Err(error) => Err(error),
    }
}
