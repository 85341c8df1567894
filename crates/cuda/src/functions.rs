//! The driver's functions: one list of names and types, and the table that is filled from a library.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

use crate::error::LoadError;
use crate::sys::*;

/// Passes the list of functions to the macro `$apply`: first the functions that every driver has, then those that
/// older drivers lack. All return a [`CUresult`].
macro_rules! functions {
    ($apply:ident) => {
        $apply! {
            required {
                cuInit(flags: c_uint);
                cuGetErrorName(error: CUresult, text: *mut *const c_char);
                cuGetErrorString(error: CUresult, text: *mut *const c_char);

                cuDeviceGetCount(count: *mut c_int);
                cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
                cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice);
                cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
                cuDeviceGetAttribute(value: *mut c_int, attribute: CUdeviceAttribute, device: CUdevice);
                cuDeviceCanAccessPeer(can_access: *mut c_int, device: CUdevice, peer: CUdevice);

                cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
                cuDevicePrimaryCtxRelease_v2(device: CUdevice);
                cuDevicePrimaryCtxGetState(device: CUdevice, flags: *mut c_uint, active: *mut c_int);
                cuCtxGetCurrent(context: *mut CUcontext);
                cuCtxGetDevice(device: *mut CUdevice);
                cuCtxPushCurrent_v2(context: CUcontext);
                cuCtxPopCurrent_v2(context: *mut CUcontext);
                cuCtxSynchronize();
                cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint);

                cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
                cuMemAlloc_v2(address: *mut CUdeviceptr, size: usize);
                cuMemFree_v2(address: CUdeviceptr);
                cuMemGetAddressRange_v2(
                    base: *mut CUdeviceptr,
                    size: *mut usize,
                    address: CUdeviceptr
                );
                cuIpcGetMemHandle(handle: *mut CUipcMemHandle, address: CUdeviceptr);
                cuIpcOpenMemHandle_v2(
                    address: *mut CUdeviceptr,
                    handle: CUipcMemHandle,
                    flags: c_uint
                );
                cuIpcCloseMemHandle(address: CUdeviceptr);

                cuMemGetAllocationGranularity(
                    granularity: *mut usize,
                    properties: *const CUmemAllocationProp,
                    option: CUmemAllocationGranularityFlags
                );
                cuMemAddressReserve(
                    address: *mut CUdeviceptr,
                    size: usize,
                    alignment: usize,
                    hint: CUdeviceptr,
                    flags: c_ulonglong
                );
                cuMemAddressFree(address: CUdeviceptr, size: usize);
                cuMemCreate(
                    handle: *mut CUmemGenericAllocationHandle,
                    size: usize,
                    properties: *const CUmemAllocationProp,
                    flags: c_ulonglong
                );
                cuMemRelease(handle: CUmemGenericAllocationHandle);
                cuMemMap(
                    address: CUdeviceptr,
                    size: usize,
                    offset: usize,
                    handle: CUmemGenericAllocationHandle,
                    flags: c_ulonglong
                );
                cuMemUnmap(address: CUdeviceptr, size: usize);
                cuMemSetAccess(
                    address: CUdeviceptr,
                    size: usize,
                    access: *const CUmemAccessDesc,
                    count: usize
                );
                cuMemExportToShareableHandle(
                    shareable: *mut c_void,
                    handle: CUmemGenericAllocationHandle,
                    kind: CUmemAllocationHandleType,
                    flags: c_ulonglong
                );
                cuMemImportFromShareableHandle(
                    handle: *mut CUmemGenericAllocationHandle,
                    shareable: *mut c_void,
                    kind: CUmemAllocationHandleType
                );

                cuEventCreate(event: *mut CUevent, flags: c_uint);
                cuEventRecord(event: CUevent, stream: CUstream);
                cuEventQuery(event: CUevent);
                cuEventSynchronize(event: CUevent);
                cuEventDestroy_v2(event: CUevent);
                cuStreamCreate(stream: *mut CUstream, flags: c_uint);
                cuStreamDestroy_v2(stream: CUstream);
                cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
                cuStreamSynchronize(stream: CUstream);
                cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
                cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
                cuStreamGetCaptureInfo_v2(
                    stream: CUstream,
                    status: *mut CUstreamCaptureStatus,
                    id: *mut u64,
                    graph: *mut CUgraph,
                    dependencies: *mut *const CUgraphNode,
                    dependency_count: *mut usize
                );
                cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);

                cuMemsetD8Async(address: CUdeviceptr, byte: c_uchar, count: usize, stream: CUstream);
                cuMemcpyHtoD_v2(destination: CUdeviceptr, source: *const c_void, size: usize);
                cuMemcpyDtoH_v2(destination: *mut c_void, source: CUdeviceptr, size: usize);
                cuMemcpyHtoDAsync_v2(
                    destination: CUdeviceptr,
                    source: *const c_void,
                    size: usize,
                    stream: CUstream
                );
                cuMemcpyDtoHAsync_v2(
                    destination: *mut c_void,
                    source: CUdeviceptr,
                    size: usize,
                    stream: CUstream
                );
                cuMemHostRegister_v2(memory: *mut c_void, size: usize, flags: c_uint);
                cuMemHostUnregister(memory: *mut c_void);
            }
            optional {
                cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
                cuStreamGetCaptureInfo_v3(
                    stream: CUstream,
                    status: *mut CUstreamCaptureStatus,
                    id: *mut u64,
                    graph: *mut CUgraph,
                    dependencies: *mut *const CUgraphNode,
                    edges: *mut *const CUgraphEdgeData,
                    dependency_count: *mut usize
                );
                cuGraphNodeGetDependencies_v2(
                    node: CUgraphNode,
                    dependencies: *mut CUgraphNode,
                    edges: *mut CUgraphEdgeData,
                    dependency_count: *mut usize
                );
            }
        }
    };
}

/// Generates the table of functions and the code that fills it.
macro_rules! function_table {
    (
        required { $($name:ident($($argument:ident: $type:ty),*);)* }
        optional { $($name_optional:ident($($argument_optional:ident: $type_optional:ty),*);)* }
    ) => {
        /// The driver's functions, named as in the library.
        #[expect(non_snake_case, reason = "the names of the library's symbols")]
        #[derive(Debug)]
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) -> CUresult,)*
            $(pub(crate) $name_optional:
                Option<unsafe extern "C" fn($($type_optional),*) -> CUresult>,)*
        }

        impl Functions {
            pub(crate) fn find_all(loaded: &libloading::Library) -> Result<Functions, LoadError> {
                Ok(Functions {
                    $(
                        // SAFETY: the list has the types of cuda.h; the tests compare them.
                        $name: unsafe { find(loaded, stringify!($name)) }?,
                    )*
                    $(
                        // SAFETY: as above.
                        $name_optional: unsafe { find(loaded, stringify!($name_optional)) }.ok(),
                    )*
                })
            }
        }
    };
}

functions!(function_table);

/// Returns a function of the library by its name.
///
/// # Safety
///
/// `F` must be the type that cuda.h gives the function.
pub(crate) unsafe fn find<F: Copy>(
    loaded: &libloading::Library,
    name: &'static str,
) -> Result<F, LoadError> {
    // SAFETY: the type is right by the contract of this function.
    let found = unsafe { loaded.get::<F>(name) };
    match found {
        Ok(function) => Ok(*function),
        Err(_) => Err(LoadError::MissingFunction { name }),
    }
}

#[cfg(test)]
mod tests {
    //! Compares the signatures with those that `cudarc` generated from NVIDIA's header.

    use cudarc::driver::sys as cudarc;

    use super::*;
    use crate::sys::tests::Counterpart;

    macro_rules! same_signatures {
        (
            required { $($name:ident($($argument:ident: $type:ty),*);)* }
            optional { $($name_optional:ident($($argument_optional:ident: $type_optional:ty),*);)* }
        ) => {
            $(const _: unsafe fn($(<$type as Counterpart>::Theirs),*) -> cudarc::CUresult =
                cudarc::$name;)*
            $(const _: unsafe fn($(<$type_optional as Counterpart>::Theirs),*) -> cudarc::CUresult =
                cudarc::$name_optional;)*
        };
    }

    // The compiler is the test: a function with another signature cannot initialize a constant of this type.
    functions!(same_signatures);
}
