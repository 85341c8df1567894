//! The calls of the driver, by name, and what is counted about them.

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
    /// [`lowtide_core::Driver::memory_info`].
    MemoryInfo,
}

impl Call {
    /// Every call, in the order of the trait.
    pub const ALL: [Call; 16] = [
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
        Call::MemoryInfo,
    ];

    /// Returns the name of the CUDA function behind the call.
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
            Call::MemoryInfo => "cudaMemGetInfo",
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What is known about all calls of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct CallStats {
    /// How often it was called, failures included.
    pub count: u64,
    /// How often it failed.
    pub failures: u64,
    /// The bytes of the calls that did not fail, as their caller stated them.
    pub bytes: Bytes,
    /// What the calls themselves cost the host, in nanoseconds.
    pub cost_ns: u64,
    /// How long they waited for the device's work, in nanoseconds.
    pub wait_ns: u64,
}
