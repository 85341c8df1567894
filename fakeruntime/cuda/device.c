/* Devices, contexts and errors. */
#define _GNU_SOURCE
#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef cudaGetDeviceProperties

enum { DEVICES_MAX = 64 };

static pthread_once_t opened = PTHREAD_ONCE_INIT;
static void *driver;
static pthread_mutex_t primary_lock = PTHREAD_MUTEX_INITIALIZER;
static CUcontext primary[DEVICES_MAX];
static __thread int noted_device;
static __thread cudaError_t last_error;

static CUresult not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

static void open_driver(void) {
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!driver) {
        fprintf(stderr, "fakeruntime: %s\n", dlerror());
        abort();
    }
    CUresult (*init)(unsigned) = (CUresult(*)(unsigned))dlsym(driver, "cuInit");
    init(0);
}

void *find_driver_function(const char *name) {
    pthread_once(&opened, open_driver);
    return dlsym(driver, name);
}

void *driver_function(const char *name) {
    void *found = find_driver_function(name);
    return found ? found : (void *)not_supported;
}

cudaError_t finish(cudaError_t error) {
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
}

cudaError_t enter_device(int device) {
    pthread_mutex_lock(&primary_lock);
    CUresult result = CUDA_SUCCESS;
    if (!primary[device]) {
        result = DRIVER(cuDevicePrimaryCtxRetain)(&primary[device], device);
    }
    pthread_mutex_unlock(&primary_lock);
    if (result == CUDA_SUCCESS) {
        noted_device = device;
        result = DRIVER(cuCtxSetCurrent)(primary[device]);
    }
    return (cudaError_t)result;
}

cudaError_t enter(void) {
    CUcontext context = NULL;
    CUresult result = DRIVER(cuCtxGetCurrent)(&context);
    if (result != CUDA_SUCCESS) {
        return (cudaError_t)result;
    }
    return context ? cudaSuccess : enter_device(noted_device);
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorString(cudaError_t error) {
    const char *text = NULL;
    DRIVER(cuGetErrorString)((CUresult)error, &text);
    return text ? text : "unknown error";
}

const char *cudaGetErrorName(cudaError_t error) {
    const char *name = NULL;
    DRIVER(cuGetErrorName)((CUresult)error, &name);
    return name ? name : "unknown error";
}

cudaError_t cudaGetDeviceCount(int *count) { return FINISH(DRIVER(cuDeviceGetCount)(count)); }

cudaError_t cudaGetDevice(int *device) {
    CUcontext context = NULL;
    *device = noted_device;
    if (DRIVER(cuCtxGetCurrent)(&context) != CUDA_SUCCESS || !context) {
        return cudaSuccess;
    }
    return FINISH(DRIVER(cuCtxGetDevice)(device));
}

cudaError_t cudaSetDevice(int device) {
    int count = 0;
    cudaGetDeviceCount(&count);
    if (device < 0 || device >= count || device >= DEVICES_MAX) {
        return finish(cudaErrorInvalidDevice);
    }
    return finish(enter_device(device));
}

cudaError_t cudaDriverGetVersion(int *version) { return FINISH(DRIVER(cuDriverGetVersion)(version)); }

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

static cudaError_t get_properties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "fakecuda");
    size_t total = 0;
    CUresult result = DRIVER(cuDeviceTotalMem)(&total, device);
    properties->totalGlobalMem = total;
    properties->major = 9;
    properties->multiProcessorCount = 132;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxThreadsPerBlock = 1024;
    properties->warpSize = 32;
    properties->regsPerBlock = 65536;
    properties->regsPerMultiprocessor = 65536;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = 227 << 10;
    properties->sharedMemPerMultiprocessor = 228 << 10;
    properties->l2CacheSize = 50 << 20;
    properties->unifiedAddressing = 1;
    for (int axis = 0; axis < 3; axis++) {
        properties->maxGridSize[axis] = axis == 0 ? 0x7fffffff : 65535;
        properties->maxThreadsDim[axis] = 1024;
    }
    return FINISH(result);
}

/* Its name in CUDA 12 and in CUDA 13. */
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *properties, int device) {
    return get_properties(properties, device);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    return get_properties(properties, device);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    return FINISH(DRIVER(cuDeviceGetAttribute)(value, (CUdevice_attribute)attribute, device));
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", device);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    WITH_CONTEXT;
    if (least) {
        *least = 0;
    }
    if (greatest) {
        *greatest = -5;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuCtxSynchronize)());
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    return FINISH(DRIVER(cuDeviceCanAccessPeer)(can, device, peer));
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    WITH_CONTEXT;
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaGetDeviceCount(&count);
    if (peer < 0 || peer >= count || peer >= DEVICES_MAX) {
        return finish(cudaErrorInvalidDevice);
    }
    cudaError_t error = enter_device(peer);
    if (error == cudaSuccess) {
        error = enter_device(device);
    }
    if (error != cudaSuccess) {
        return finish(error);
    }
    return FINISH(DRIVER(cuCtxEnablePeerAccess)(primary[peer], flags));
}
