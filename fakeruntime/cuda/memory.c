/* Device memory, host memory, copies, and memory of other processes. */
#include "runtime.h"

#include <string.h>

cudaError_t cudaMalloc(void **memory, size_t size) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuMemAlloc)((CUdeviceptr *)memory, size));
}

/* As the runtime does, waits for all work of the device first. */
cudaError_t cudaFree(void *memory) {
    WITH_CONTEXT;
    if (!memory) {
        return cudaSuccess;
    }
    cudaError_t error = cudaDeviceSynchronize();
    return error != cudaSuccess ? error : FINISH(DRIVER(cuMemFree)((CUdeviceptr)memory));
}

cudaError_t cudaMallocManaged(void **memory, size_t size, unsigned flags) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuMemAllocManaged)((CUdeviceptr *)memory, size, flags));
}

cudaError_t cudaMallocAsync(void **memory, size_t size, cudaStream_t stream) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuMemAllocAsync)((CUdeviceptr *)memory, size, stream));
}

cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuMemFreeAsync)((CUdeviceptr)memory, stream));
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuMemGetInfo)(free, total));
}

cudaError_t cudaHostAlloc(void **memory, size_t size, unsigned flags) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuMemHostAlloc)(memory, size, flags));
}

cudaError_t cudaMallocHost(void **memory, size_t size) { return cudaHostAlloc(memory, size, 0); }

cudaError_t cudaFreeHost(void *memory) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuMemFreeHost)(memory));
}

cudaError_t cudaHostRegister(void *memory, size_t size, unsigned flags) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuMemHostRegister)(memory, size, flags));
}

cudaError_t cudaHostUnregister(void *memory) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuMemHostUnregister)(memory));
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuMemcpyAsync)((CUdeviceptr)to, (CUdeviceptr)from, size, stream));
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuMemcpy)((CUdeviceptr)to, (CUdeviceptr)from, size));
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t size, cudaStream_t stream) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuMemsetD8Async)((CUdeviceptr)memory, value, size, stream));
}

cudaError_t cudaMemset(void *memory, int value, size_t size) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuMemsetD8)((CUdeviceptr)memory, value, size));
}

/* Memory that the driver does not know is the program's own. */
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    CUdeviceptr address = (CUdeviceptr)pointer;
    CUmemorytype type = 0;
    memset(attributes, 0, sizeof *attributes);
    DRIVER(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
    DRIVER(cuPointerGetAttribute)(&attributes->device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
    attributes->type = type == CU_MEMORYTYPE_DEVICE ? cudaMemoryTypeDevice
                       : type == CU_MEMORYTYPE_HOST ? cudaMemoryTypeHost
                                                    : cudaMemoryTypeUnregistered;
    attributes->devicePointer = (void *)pointer;
    attributes->hostPointer = (void *)pointer;
    return cudaSuccess;
}

_Static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(CUipcMemHandle), "one is copied into the other");

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *memory) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuIpcGetMemHandle)((CUipcMemHandle *)handle, (CUdeviceptr)memory));
}

cudaError_t cudaIpcOpenMemHandle(void **memory, cudaIpcMemHandle_t handle, unsigned flags) {
    WITH_CONTEXT;
    CUipcMemHandle same;
    memcpy(&same, &handle, sizeof same);
    return FINISH(DRIVER(cuIpcOpenMemHandle)((CUdeviceptr *)memory, same, flags));
}

cudaError_t cudaIpcCloseMemHandle(void *memory) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuIpcCloseMemHandle)((CUdeviceptr)memory));
}
