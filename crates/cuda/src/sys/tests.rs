//! Compares `sys.rs` with the bindings that `cudarc` generated from NVIDIA's header.
//!
//! Not covered: whether a machine's driver behaves as its header says. `examples/smoke.rs` checks that on a card.

use std::mem::{align_of, offset_of, size_of};

use cudarc::driver::sys as cudarc;

use super::*;

/// Maps one of our types to cudarc's, so that the compiler can compare signatures.
pub(crate) trait Counterpart {
    type Theirs;
}

macro_rules! counterparts {
    ($($ours:ty = $theirs:ty,)*) => {
        $(impl Counterpart for $ours { type Theirs = $theirs; })*

        #[test]
        fn sizes_and_alignments() {
            $(
                assert_eq!(size_of::<$ours>(), size_of::<$theirs>(), stringify!($ours));
                assert_eq!(align_of::<$ours>(), align_of::<$theirs>(), stringify!($ours));
            )*
        }
    };
}

counterparts! {
    c_char = c_char,
    c_uchar = c_uchar,
    c_int = c_int,
    c_uint = c_uint,
    c_ulonglong = c_ulonglong,
    usize = usize,
    CUctx_st = cudarc::CUctx_st,
    CUevent_st = cudarc::CUevent_st,
    CUstream_st = cudarc::CUstream_st,
    CUgraph_st = cudarc::CUgraph_st,
    CUgraphNode_st = cudarc::CUgraphNode_st,
    CUresult = cudarc::CUresult,
    CUdeviceAttribute = cudarc::CUdevice_attribute,
    CUmemAllocationType = cudarc::CUmemAllocationType,
    CUmemAllocationHandleType = cudarc::CUmemAllocationHandleType,
    CUmemLocationType = cudarc::CUmemLocationType,
    CUmemAccessFlags = cudarc::CUmemAccess_flags,
    CUmemAllocationGranularityFlags = cudarc::CUmemAllocationGranularity_flags,
    CUstreamCaptureStatus = cudarc::CUstreamCaptureStatus,
    CUstreamCaptureMode = cudarc::CUstreamCaptureMode,
    CUmemLocation = cudarc::CUmemLocation,
    CUmemAccessDesc = cudarc::CUmemAccessDesc,
    CUmemAllocationProp = cudarc::CUmemAllocationProp,
    CUmemAllocationPropFlags = cudarc::CUmemAllocationProp_st__bindgen_ty_1,
    CUuuid = cudarc::CUuuid,
    CUipcMemHandle = cudarc::CUipcMemHandle,
    CUgraphEdgeData = cudarc::CUgraphEdgeData,
}

impl Counterpart for c_void {
    type Theirs = c_void;
}

impl<T: Counterpart> Counterpart for *mut T {
    type Theirs = *mut T::Theirs;
}

impl<T: Counterpart> Counterpart for *const T {
    type Theirs = *const T::Theirs;
}

macro_rules! assert_offsets {
    ($($ours:ident . $field:ident = $theirs:ident . $their_field:ident,)*) => {$(
        assert_eq!(
            offset_of!($ours, $field),
            offset_of!(cudarc::$theirs, $their_field),
            concat!(stringify!($ours), ".", stringify!($field)),
        );
    )*};
}

#[test]
fn offsets() {
    assert_offsets! {
        CUmemLocation.kind = CUmemLocation.type_,
        CUmemLocation.id = CUmemLocation.id,
        CUmemAccessDesc.location = CUmemAccessDesc.location,
        CUmemAccessDesc.flags = CUmemAccessDesc.flags,
        CUmemAllocationProp.kind = CUmemAllocationProp.type_,
        CUmemAllocationProp.requested_handle_types = CUmemAllocationProp.requestedHandleTypes,
        CUmemAllocationProp.location = CUmemAllocationProp.location,
        CUmemAllocationProp.win32_handle_metadata = CUmemAllocationProp.win32HandleMetaData,
        CUmemAllocationProp.flags = CUmemAllocationProp.allocFlags,
        CUmemAllocationPropFlags.compression_type = CUmemAllocationProp_st__bindgen_ty_1.compressionType,
        CUmemAllocationPropFlags.gpu_direct_rdma_capable =
            CUmemAllocationProp_st__bindgen_ty_1.gpuDirectRDMACapable,
        CUmemAllocationPropFlags.usage = CUmemAllocationProp_st__bindgen_ty_1.usage,
        CUmemAllocationPropFlags.reserved = CUmemAllocationProp_st__bindgen_ty_1.reserved,
        CUuuid.bytes = CUuuid.bytes,
        CUipcMemHandle.reserved = CUipcMemHandle_st.reserved,
    }
}

macro_rules! assert_values {
    ($($ours:ident: $theirs:ident { $($variant:ident = $their_variant:ident,)* })*) => {$($(
        assert_eq!(
            $ours::$variant.0,
            cudarc::$theirs::$their_variant as c_uint,
            stringify!($their_variant),
        );
    )*)*};
}

#[test]
fn values() {
    assert_values! {
        CUresult: CUresult {
            SUCCESS = CUDA_SUCCESS,
            OUT_OF_MEMORY = CUDA_ERROR_OUT_OF_MEMORY,
            NO_DEVICE = CUDA_ERROR_NO_DEVICE,
            NOT_READY = CUDA_ERROR_NOT_READY,
            STREAM_CAPTURE_IMPLICIT = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
            PEER_ACCESS_ALREADY_ENABLED = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
            NOT_SUPPORTED = CUDA_ERROR_NOT_SUPPORTED,
        }
        CUdeviceAttribute: CUdevice_attribute {
            PCI_BUS_ID = CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
            PCI_DEVICE_ID = CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
            PCI_DOMAIN_ID = CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
            COMPUTE_CAPABILITY_MAJOR = CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            COMPUTE_CAPABILITY_MINOR = CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED =
                CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED =
                CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED =
                CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        }
        CUmemAllocationType: CUmemAllocationType {
            PINNED = CU_MEM_ALLOCATION_TYPE_PINNED,
        }
        CUmemLocationType: CUmemLocationType {
            DEVICE = CU_MEM_LOCATION_TYPE_DEVICE,
        }
        CUmemAccessFlags: CUmemAccess_flags {
            READ_WRITE = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        }
        CUmemAllocationGranularityFlags: CUmemAllocationGranularity_flags {
            MINIMUM = CU_MEM_ALLOC_GRANULARITY_MINIMUM,
        }
        CUstreamCaptureStatus: CUstreamCaptureStatus {
            NONE = CU_STREAM_CAPTURE_STATUS_NONE,
            ACTIVE = CU_STREAM_CAPTURE_STATUS_ACTIVE,
        }
        CUstreamCaptureMode: CUstreamCaptureMode {
            RELAXED = CU_STREAM_CAPTURE_MODE_RELAXED,
        }
    }
    assert_eq!(
        CU_EVENT_DISABLE_TIMING,
        cudarc::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint
    );
    assert_eq!(
        CU_EVENT_BLOCKING_SYNC,
        cudarc::CUevent_flags::CU_EVENT_BLOCKING_SYNC as c_uint
    );
    assert_eq!(
        CU_STREAM_NON_BLOCKING,
        cudarc::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint
    );
    assert_eq!(
        CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
        cudarc::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint
    );
    // These values can be combined, so cudarc has them as numbers and not as an enum.
    type Theirs = cudarc::CUmemAllocationHandleType;
    assert_eq!(
        CUmemAllocationHandleType::NONE.0,
        Theirs::CU_MEM_HANDLE_TYPE_NONE.0
    );
    assert_eq!(
        CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR.0,
        Theirs::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0
    );
}
