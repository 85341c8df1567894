//! Compares our types and constants of `cuda.h` with bindings that were generated from it.

use std::mem::{align_of, offset_of, size_of};

use cudarc::driver::sys as theirs;

use super::*;

#[test]
fn codes_have_their_values_and_names() {
    type Theirs = theirs::CUresult;
    let known = [
        Theirs::CUDA_SUCCESS,
        Theirs::CUDA_ERROR_INVALID_VALUE,
        Theirs::CUDA_ERROR_OUT_OF_MEMORY,
        Theirs::CUDA_ERROR_NOT_INITIALIZED,
        Theirs::CUDA_ERROR_DEINITIALIZED,
        Theirs::CUDA_ERROR_NO_DEVICE,
        Theirs::CUDA_ERROR_INVALID_DEVICE,
        Theirs::CUDA_ERROR_INVALID_CONTEXT,
        Theirs::CUDA_ERROR_OPERATING_SYSTEM,
        Theirs::CUDA_ERROR_INVALID_HANDLE,
        Theirs::CUDA_ERROR_ILLEGAL_STATE,
        Theirs::CUDA_ERROR_NOT_FOUND,
        Theirs::CUDA_ERROR_NOT_READY,
        Theirs::CUDA_ERROR_ILLEGAL_ADDRESS,
        Theirs::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
        Theirs::CUDA_ERROR_CONTEXT_IS_DESTROYED,
        Theirs::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
        Theirs::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
        Theirs::CUDA_ERROR_NOT_PERMITTED,
        Theirs::CUDA_ERROR_NOT_SUPPORTED,
        Theirs::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        Theirs::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        Theirs::CUDA_ERROR_STREAM_CAPTURE_MERGE,
        Theirs::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
        Theirs::CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
        Theirs::CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
        Theirs::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
        Theirs::CUDA_ERROR_CAPTURED_EVENT,
        Theirs::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
        Theirs::CUDA_ERROR_UNKNOWN,
    ];
    assert_eq!(known.len(), CUresult::ALL.len());
    for ((ours, name, _), theirs) in CUresult::ALL.iter().zip(known) {
        assert_eq!(name.to_str(), Ok(format!("{theirs:?}").as_str()));
        assert_eq!(ours.0, theirs as u32, "{theirs:?}");
    }
}

#[test]
fn structs_are_laid_out_alike() {
    macro_rules! same_layout {
        ($ours:ident, $theirs:ident: $($our_field:ident = $their_field:ident),*) => {
            assert_eq!(size_of::<$ours>(), size_of::<theirs::$theirs>());
            assert_eq!(align_of::<$ours>(), align_of::<theirs::$theirs>());
            $(assert_eq!(
                offset_of!($ours, $our_field),
                offset_of!(theirs::$theirs, $their_field),
                stringify!($ours.$our_field)
            );)*
        };
    }
    same_layout!(CUmemLocation, CUmemLocation: kind = type_, id = id);
    same_layout!(CUmemAccessDesc, CUmemAccessDesc: location = location, flags = flags);
    same_layout!(
        CUmemAllocationFlags, CUmemAllocationProp_st__bindgen_ty_1:
        compression_type = compressionType, gpu_direct_rdma_capable = gpuDirectRDMACapable,
        usage = usage, reserved = reserved
    );
    same_layout!(
        CUmemAllocationProp, CUmemAllocationProp:
        kind = type_, requested_handle_types = requestedHandleTypes, location = location,
        win32_metadata = win32HandleMetaData, flags = allocFlags
    );
    same_layout!(CUipcMemHandle, CUipcMemHandle: reserved = reserved);
    same_layout!(CUuuid, CUuuid: bytes = bytes);
    assert_eq!(size_of::<CUdeviceptr>(), size_of::<theirs::CUdeviceptr>());
    assert_eq!(size_of::<CUstream>(), size_of::<theirs::CUstream>());
    assert_eq!(size_of::<CUhostFn>(), size_of::<theirs::CUhostFn>());
}

#[test]
fn constants_have_their_values() {
    macro_rules! same {
        ($($enumeration:ident: $($name:ident),* $(,)?;)*) => {
            $($(assert_eq!($name, theirs::$enumeration::$name as u32, stringify!($name));)*)*
        };
    }
    same! {
        CUstream_flags: CU_STREAM_NON_BLOCKING;
        CUevent_flags: CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING, CU_EVENT_INTERPROCESS;
        CUstreamCaptureStatus: CU_STREAM_CAPTURE_STATUS_NONE, CU_STREAM_CAPTURE_STATUS_ACTIVE,
            CU_STREAM_CAPTURE_STATUS_INVALIDATED;
        CUstreamCaptureMode: CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED;
        CUmemAllocationType: CU_MEM_ALLOCATION_TYPE_PINNED;
        CUmemLocationType: CU_MEM_LOCATION_TYPE_DEVICE;
        CUmemAllocationGranularity_flags: CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        CUmemAccess_flags: CU_MEM_ACCESS_FLAGS_PROT_NONE, CU_MEM_ACCESS_FLAGS_PROT_READ,
            CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        CUmemAttach_flags: CU_MEM_ATTACH_GLOBAL, CU_MEM_ATTACH_HOST;
        CUipcMem_flags: CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
        CUmemorytype: CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE;
        CUpointer_attribute: CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CU_POINTER_ATTRIBUTE_HOST_POINTER,
            CU_POINTER_ATTRIBUTE_BUFFER_ID, CU_POINTER_ATTRIBUTE_IS_MANAGED,
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            CU_POINTER_ATTRIBUTE_MAPPED, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES;
        CUdevice_attribute: CU_DEVICE_ATTRIBUTE_WARP_SIZE,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY,
            CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
            CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY,
            CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        CUdriverProcAddressQueryResult: CU_GET_PROC_ADDRESS_SUCCESS,
            CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    }
    type Types = theirs::CUmemAllocationHandleType;
    assert_eq!(CU_MEM_HANDLE_TYPE_NONE, Types::CU_MEM_HANDLE_TYPE_NONE.0);
    let descriptor = Types::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    assert_eq!(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, descriptor.0);
    assert!(CU_DEVICE_ATTRIBUTE_MAX >= theirs::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX as u32);
}
