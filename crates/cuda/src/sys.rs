//! The types of NVIDIA's driver interface in C: constants and layouts, nothing else.
//!
//! They have the names of `cuda.h`, so its documentation applies to them. The tests compare every layout and value
//! with bindings that were generated from that header.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};

/// A device's number.
pub(crate) type CUdevice = c_int;
/// An address in the unified address space of the host and all devices.
pub(crate) type CUdeviceptr = c_ulonglong;
/// A handle of physical memory.
pub(crate) type CUmemGenericAllocationHandle = c_ulonglong;
/// A context: the state of one process on a device.
pub(crate) type CUcontext = *mut CUctx_st;
/// An event.
pub(crate) type CUevent = *mut CUevent_st;
/// A stream; null is the default stream.
pub(crate) type CUstream = *mut CUstream_st;
/// A graph.
pub(crate) type CUgraph = *mut CUgraph_st;
/// A node of a graph.
pub(crate) type CUgraphNode = *mut CUgraphNode_st;

macro_rules! opaque {
    ($($name:ident)*) => {$(
        #[repr(C)]
        pub(crate) struct $name {
            private: [u8; 0],
        }
    )*};
}

opaque! { CUctx_st CUevent_st CUstream_st CUgraph_st CUgraphNode_st }

/// Defines a C enumeration as a number, because the driver may return values that are not listed.
macro_rules! enumeration {
    ($name:ident { $($variant:ident = $value:expr,)* }) => {
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) struct $name(pub(crate) c_uint);

        impl $name {
            $(pub(crate) const $variant: $name = $name($value);)*
        }
    };
}

enumeration! { CUresult {
    SUCCESS = 0,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    NOT_READY = 600,
    PEER_ACCESS_ALREADY_ENABLED = 704,
    STREAM_CAPTURE_IMPLICIT = 906,
    NOT_SUPPORTED = 801,
}}

enumeration! { CUdeviceAttribute {
    PCI_BUS_ID = 33,
    PCI_DEVICE_ID = 34,
    PCI_DOMAIN_ID = 50,
    COMPUTE_CAPABILITY_MAJOR = 75,
    COMPUTE_CAPABILITY_MINOR = 76,
    VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
    HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
    GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
}}

enumeration! { CUmemAllocationType { PINNED = 1, }}
enumeration! { CUmemAllocationHandleType { NONE = 0, POSIX_FILE_DESCRIPTOR = 1, }}
enumeration! { CUmemLocationType { DEVICE = 1, }}
enumeration! { CUmemAccessFlags { READ_WRITE = 3, }}
enumeration! { CUmemAllocationGranularityFlags { MINIMUM = 0, }}
enumeration! { CUstreamCaptureStatus { NONE = 0, ACTIVE = 1, }}
enumeration! { CUstreamCaptureMode { RELAXED = 2, }}

/// Creates an event without timing, which costs less to record and to query.
pub(crate) const CU_EVENT_DISABLE_TIMING: c_uint = 2;

/// Creates an event for which a waiting thread sleeps and does not spin.
pub(crate) const CU_EVENT_BLOCKING_SYNC: c_uint = 1;

/// Creates a stream that does not synchronize with the default stream.
pub(crate) const CU_STREAM_NON_BLOCKING: c_uint = 1;

/// Enables peer access for the opening device when the memory belongs to another device.
pub(crate) const CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

/// The location of memory, and the device that may access it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemLocation {
    pub(crate) kind: CUmemLocationType,
    pub(crate) id: c_int,
}

/// The dependency data of an edge between two graph nodes. The driver returns it; lowtide does not read it.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct CUgraphEdgeData {
    private: [c_uchar; 8],
}

/// A device's access rights to a mapped range.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemAccessDesc {
    pub(crate) location: CUmemLocation,
    pub(crate) flags: CUmemAccessFlags,
}

/// The properties of physical memory to create.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemAllocationProp {
    pub(crate) kind: CUmemAllocationType,
    pub(crate) requested_handle_types: CUmemAllocationHandleType,
    pub(crate) location: CUmemLocation,
    pub(crate) win32_handle_metadata: *mut c_void,
    pub(crate) flags: CUmemAllocationPropFlags,
}

/// The flags of [`CUmemAllocationProp`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemAllocationPropFlags {
    pub(crate) compression_type: c_uchar,
    pub(crate) gpu_direct_rdma_capable: c_uchar,
    pub(crate) usage: c_ushort,
    pub(crate) reserved: [c_uchar; 4],
}

/// The UUID of a device, which is the same in every process.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUuuid {
    pub(crate) bytes: [c_char; 16],
}

/// An allocation's IPC handle.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUipcMemHandle {
    pub(crate) reserved: [c_char; 64],
}

#[cfg(test)]
pub(crate) mod tests;
