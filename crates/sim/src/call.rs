//! The driver's calls, and the statistics of each.

use std::fmt;

use lowtide_core::Bytes;

/// A call of [`lowtide_core::Driver`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Call {
    /// [`lowtide_core::Driver::allocate`].
    Allocate,
    /// [`lowtide_core::Driver::free`].
    Free,
    /// [`lowtide_core::Driver::reserve`].
    Reserve,
    /// [`lowtide_core::Driver::unreserve`].
    Unreserve,
    /// [`lowtide_core::Driver::create`].
    Create,
    /// [`lowtide_core::Driver::release`].
    Release,
    /// [`lowtide_core::Driver::map`].
    Map,
    /// [`lowtide_core::Driver::set_access`].
    SetAccess,
    /// [`lowtide_core::Driver::unmap`].
    Unmap,
    /// [`lowtide_core::Driver::record_event`].
    RecordEvent,
    /// [`lowtide_core::Driver::query_event`].
    QueryEvent,
    /// [`lowtide_core::Driver::synchronize_event`].
    SynchronizeEvent,
    /// [`lowtide_core::Driver::wait_event`].
    WaitEvent,
    /// [`lowtide_core::Driver::release_event`].
    ReleaseEvent,
    /// [`lowtide_core::Driver::synchronize_stream`].
    SynchronizeStream,
    /// [`lowtide_core::Driver::synchronize_device`].
    SynchronizeDevice,
    /// [`lowtide_core::Driver::memory_info`].
    MemoryInfo,
}

impl Call {
    /// All calls, in the order of the trait.
    pub const ALL: [Call; 17] = [
        Call::Allocate,
        Call::Free,
        Call::Reserve,
        Call::Unreserve,
        Call::Create,
        Call::Release,
        Call::Map,
        Call::SetAccess,
        Call::Unmap,
        Call::RecordEvent,
        Call::QueryEvent,
        Call::SynchronizeEvent,
        Call::WaitEvent,
        Call::ReleaseEvent,
        Call::SynchronizeStream,
        Call::SynchronizeDevice,
        Call::MemoryInfo,
    ];

    /// Returns the name of the CUDA function that the call stands for.
    pub const fn name(self) -> &'static str {
        match self {
            Call::Allocate => "cudaMalloc",
            Call::Free => "cudaFree",
            Call::Reserve => "cuMemAddressReserve",
            Call::Unreserve => "cuMemAddressFree",
            Call::Create => "cuMemCreate",
            Call::Release => "cuMemRelease",
            Call::Map => "cuMemMap",
            Call::SetAccess => "cuMemSetAccess",
            Call::Unmap => "cuMemUnmap",
            Call::RecordEvent => "cudaEventRecord",
            Call::QueryEvent => "cudaEventQuery",
            Call::SynchronizeEvent => "cudaEventSynchronize",
            Call::WaitEvent => "cudaStreamWaitEvent",
            Call::ReleaseEvent => "cudaEventDestroy",
            Call::SynchronizeStream => "cudaStreamSynchronize",
            Call::SynchronizeDevice => "cudaDeviceSynchronize",
            Call::MemoryInfo => "cudaMemGetInfo",
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The statistics of one kind of call.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct CallStats {
    /// The number of calls, including failed ones.
    pub count: u64,
    /// The number of failed calls.
    pub failures: u64,
    /// The sum of the sizes that were passed to calls that succeeded.
    pub bytes: Bytes,
    /// The host time of the calls, in nanoseconds, without waits.
    pub cost_ns: u64,
    /// The time that the calls waited for the device's work, in nanoseconds.
    pub wait_ns: u64,
}
