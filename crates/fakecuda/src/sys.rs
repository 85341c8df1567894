//! The types and constants of `cuda.h` that the calls take, written from NVIDIA's manual.
//!
//! CUDA's enumerations are plain integers here. A caller may pass any value, and a value that a Rust enumeration
//! does not list would be undefined behaviour before it could be refused.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ushort, c_void};

/// The result of every call.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CUresult(pub(crate) c_uint);

/// Defines the error codes, and the table for `cuGetErrorName` and `cuGetErrorString`.
macro_rules! results {
    ($($name:ident $cuda_name:literal = $value:literal, $text:literal;)*) => {
        impl CUresult {
            $(pub(crate) const $name: Self = Self($value);)*
            /// Every code with its name in `cuda.h` and a description, both zero-terminated.
            pub(crate) const ALL: &[(Self, &std::ffi::CStr, &std::ffi::CStr)] =
                &[$((Self::$name, $cuda_name, $text)),*];
        }
    };
}

results! {
    SUCCESS c"CUDA_SUCCESS" = 0, c"no error";
    INVALID_VALUE c"CUDA_ERROR_INVALID_VALUE" = 1, c"invalid argument";
    OUT_OF_MEMORY c"CUDA_ERROR_OUT_OF_MEMORY" = 2, c"out of memory";
    NOT_INITIALIZED c"CUDA_ERROR_NOT_INITIALIZED" = 3, c"initialization error";
    DEINITIALIZED c"CUDA_ERROR_DEINITIALIZED" = 4, c"driver shutting down";
    NO_DEVICE c"CUDA_ERROR_NO_DEVICE" = 100, c"no CUDA-capable device is detected";
    INVALID_DEVICE c"CUDA_ERROR_INVALID_DEVICE" = 101, c"invalid device ordinal";
    INVALID_CONTEXT c"CUDA_ERROR_INVALID_CONTEXT" = 201, c"invalid device context";
    OPERATING_SYSTEM c"CUDA_ERROR_OPERATING_SYSTEM" = 304, c"OS call failed or operation not supported on this OS";
    INVALID_HANDLE c"CUDA_ERROR_INVALID_HANDLE" = 400, c"invalid resource handle";
    ILLEGAL_STATE c"CUDA_ERROR_ILLEGAL_STATE" = 401, c"the operation cannot be performed in the present state";
    NOT_FOUND c"CUDA_ERROR_NOT_FOUND" = 500, c"named symbol not found";
    NOT_READY c"CUDA_ERROR_NOT_READY" = 600, c"device not ready";
    ILLEGAL_ADDRESS c"CUDA_ERROR_ILLEGAL_ADDRESS" = 700, c"an illegal memory access was encountered";
    PEER_ACCESS_ALREADY_ENABLED c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED" = 704, c"peer access is already enabled";
    CONTEXT_IS_DESTROYED c"CUDA_ERROR_CONTEXT_IS_DESTROYED" = 709, c"context is destroyed";
    HOST_MEMORY_ALREADY_REGISTERED c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" = 712, c"part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED" = 713, c"pointer does not correspond to a registered memory region";
    NOT_PERMITTED c"CUDA_ERROR_NOT_PERMITTED" = 800, c"operation not permitted";
    NOT_SUPPORTED c"CUDA_ERROR_NOT_SUPPORTED" = 801, c"operation not supported";
    STREAM_CAPTURE_UNSUPPORTED c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" = 900, c"operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED" = 901, c"operation failed due to a previous error during capture";
    STREAM_CAPTURE_MERGE c"CUDA_ERROR_STREAM_CAPTURE_MERGE" = 902, c"operation would result in a merge of separate capture sequences";
    STREAM_CAPTURE_UNMATCHED c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED" = 903, c"capture was not ended in the same stream as it began";
    STREAM_CAPTURE_UNJOINED c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED" = 904, c"capturing stream has unjoined work";
    STREAM_CAPTURE_ISOLATION c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION" = 905, c"dependency created on uncaptured work in another stream";
    STREAM_CAPTURE_IMPLICIT c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT" = 906, c"operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT c"CUDA_ERROR_CAPTURED_EVENT" = 907, c"operation not permitted on an event last recorded in a capturing stream";
    STREAM_CAPTURE_WRONG_THREAD c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD" = 908, c"attempt to terminate a thread-local capture sequence from another thread";
    UNKNOWN c"CUDA_ERROR_UNKNOWN" = 999, c"unknown error";
}

/// The version that `cuDriverGetVersion` returns: CUDA 13.0.
pub(crate) const DRIVER_VERSION: c_int = 13000;

pub(crate) type CUdevice = c_int;
pub(crate) type CUdeviceptr = u64;
/// Contexts, streams, events, graphs and their nodes are pointers in C. They are never dereferenced here.
pub(crate) type CUcontext = u64;
pub(crate) type CUstream = u64;
pub(crate) type CUevent = u64;
pub(crate) type CUgraph = u64;
pub(crate) type CUgraphNode = u64;
pub(crate) type CUmemGenericAllocationHandle = u64;
pub(crate) type CUhostFn = Option<unsafe extern "C" fn(*mut c_void)>;

/// The default streams have fixed handles: null, and these two.
pub(crate) const CU_STREAM_LEGACY: CUstream = 1;
pub(crate) const CU_STREAM_PER_THREAD: CUstream = 2;

pub(crate) const CU_STREAM_NON_BLOCKING: c_uint = 1;

pub(crate) const CU_EVENT_BLOCKING_SYNC: c_uint = 1;
pub(crate) const CU_EVENT_DISABLE_TIMING: c_uint = 2;
pub(crate) const CU_EVENT_INTERPROCESS: c_uint = 4;

pub(crate) const CU_STREAM_CAPTURE_STATUS_NONE: c_uint = 0;
pub(crate) const CU_STREAM_CAPTURE_STATUS_ACTIVE: c_uint = 1;
pub(crate) const CU_STREAM_CAPTURE_STATUS_INVALIDATED: c_uint = 2;

pub(crate) const CU_STREAM_CAPTURE_MODE_GLOBAL: c_uint = 0;
pub(crate) const CU_STREAM_CAPTURE_MODE_RELAXED: c_uint = 2;

pub(crate) const CU_MEM_ALLOCATION_TYPE_PINNED: c_uint = 1;
pub(crate) const CU_MEM_LOCATION_TYPE_DEVICE: c_uint = 1;
pub(crate) const CU_MEM_HANDLE_TYPE_NONE: c_uint = 0;
pub(crate) const CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_uint = 1;
pub(crate) const CU_MEM_HANDLE_TYPE_FABRIC: c_uint = 8;
pub(crate) const CU_MEM_ALLOC_GRANULARITY_RECOMMENDED: c_uint = 1;

pub(crate) const CU_MEM_ACCESS_FLAGS_PROT_NONE: c_uint = 0;
pub(crate) const CU_MEM_ACCESS_FLAGS_PROT_READ: c_uint = 1;
pub(crate) const CU_MEM_ACCESS_FLAGS_PROT_READWRITE: c_uint = 3;

pub(crate) const CU_MEM_ATTACH_GLOBAL: c_uint = 1;
pub(crate) const CU_MEM_ATTACH_HOST: c_uint = 2;

pub(crate) const CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

pub(crate) const CU_MEMORYTYPE_HOST: c_uint = 1;
pub(crate) const CU_MEMORYTYPE_DEVICE: c_uint = 2;

pub(crate) const CU_POINTER_ATTRIBUTE_CONTEXT: c_uint = 1;
pub(crate) const CU_POINTER_ATTRIBUTE_MEMORY_TYPE: c_uint = 2;
pub(crate) const CU_POINTER_ATTRIBUTE_DEVICE_POINTER: c_uint = 3;
pub(crate) const CU_POINTER_ATTRIBUTE_HOST_POINTER: c_uint = 4;
pub(crate) const CU_POINTER_ATTRIBUTE_BUFFER_ID: c_uint = 7;
pub(crate) const CU_POINTER_ATTRIBUTE_IS_MANAGED: c_uint = 8;
pub(crate) const CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: c_uint = 9;
pub(crate) const CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: c_uint = 10;
pub(crate) const CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: c_uint = 11;
pub(crate) const CU_POINTER_ATTRIBUTE_RANGE_SIZE: c_uint = 12;
pub(crate) const CU_POINTER_ATTRIBUTE_MAPPED: c_uint = 13;
pub(crate) const CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: c_uint = 14;

pub(crate) const CU_DEVICE_ATTRIBUTE_WARP_SIZE: c_uint = 10;
pub(crate) const CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: c_uint = 16;
pub(crate) const CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: c_uint = 19;
pub(crate) const CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: c_uint = 31;
pub(crate) const CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: c_uint = 33;
pub(crate) const CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: c_uint = 41;
pub(crate) const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: c_uint = 75;
pub(crate) const CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY: c_uint = 83;
pub(crate) const CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: c_uint = 99;
pub(crate) const CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: c_uint = 102;
pub(crate) const CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: c_uint = 103;
pub(crate) const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: c_uint = 110;
pub(crate) const CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: c_uint = 115;
/// The first value that is not an attribute, in CUDA 13.3. Smaller values that are not listed here are zero.
pub(crate) const CU_DEVICE_ATTRIBUTE_MAX: c_uint = 150;

pub(crate) const CU_GET_PROC_ADDRESS_SUCCESS: c_uint = 0;
pub(crate) const CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND: c_uint = 1;
pub(crate) const CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT: c_uint = 2;

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct CUmemLocation {
    pub(crate) kind: c_uint,
    pub(crate) id: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CUmemAccessDesc {
    pub(crate) location: CUmemLocation,
    pub(crate) flags: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct CUmemAllocationFlags {
    pub(crate) compression_type: c_uchar,
    pub(crate) gpu_direct_rdma_capable: c_uchar,
    pub(crate) usage: c_ushort,
    pub(crate) reserved: [c_uchar; 4],
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct CUmemAllocationProp {
    pub(crate) kind: c_uint,
    pub(crate) requested_handle_types: c_uint,
    pub(crate) location: CUmemLocation,
    /// A pointer in C, null except on Windows. It is a number here, so that threads can share the type.
    pub(crate) win32_metadata: usize,
    pub(crate) flags: CUmemAllocationFlags,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CUipcMemHandle {
    pub(crate) reserved: [u8; 64],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CUuuid {
    pub(crate) bytes: [u8; 16],
}

/// A C string that the caller of `cuGetErrorName` must not free.
pub(crate) type StaticText = *const c_char;

#[cfg(test)]
mod tests;
