/* A stand-in for CUDA's runtime, as a library or as part of a program: as the real one it opens the driver when
 * it is first used, looks cuGetProcAddress up in it, everything else by that, and keeps the last error. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define CUDA_VERSION 12090
#define PER_THREAD_STREAM 2

typedef int (*get_proc_address)(const char *, void **, int, uint64_t, unsigned *);

static struct {
    int (*init)(unsigned);
    int (*retain)(void **, int);
    int (*get_current)(void **);
    int (*set_current)(void *);
    int (*reset)(int);
    int (*synchronize)(void);
    int (*allocate)(uint64_t *, size_t);
    int (*release)(uint64_t);
    int (*allocate_async[2])(uint64_t *, size_t, void *);
    int (*release_async[2])(uint64_t, void *);
    int (*allocate_managed)(uint64_t *, size_t, unsigned);
    int (*info)(size_t *, size_t *);
    int (*ipc_handle)(void *, uint64_t);
    int (*stream_create)(void **, unsigned);
    int (*stream_destroy)(void *);
    int (*stream_synchronize)(void *);
    int (*set_bytes)(uint64_t, unsigned char, size_t, void *);
} driver;

static int load_error = 100;
static __thread int last_error;
static __thread int device;

static int find(get_proc_address get, const char *name, uint64_t flags, void *function) {
    unsigned status;
    return get(name, (void **)function, CUDA_VERSION, flags, &status);
}

static void load(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library)
        return;
    get_proc_address get;
    *(void **)&get = dlsym(library, "cuGetProcAddress_v2");
    if (!get)
        return;
    int failed = find(get, "cuInit", 0, &driver.init);
    failed |= find(get, "cuDevicePrimaryCtxRetain", 0, &driver.retain);
    failed |= find(get, "cuCtxGetCurrent", 0, &driver.get_current);
    failed |= find(get, "cuCtxSetCurrent", 0, &driver.set_current);
    failed |= find(get, "cuDevicePrimaryCtxReset", 0, &driver.reset);
    failed |= find(get, "cuCtxSynchronize", 0, &driver.synchronize);
    failed |= find(get, "cuMemAlloc", 0, &driver.allocate);
    failed |= find(get, "cuMemFree", 0, &driver.release);
    failed |= find(get, "cuMemAllocAsync", 0, &driver.allocate_async[0]);
    failed |= find(get, "cuMemFreeAsync", 0, &driver.release_async[0]);
    failed |= find(get, "cuMemAllocAsync", PER_THREAD_STREAM, &driver.allocate_async[1]);
    failed |= find(get, "cuMemFreeAsync", PER_THREAD_STREAM, &driver.release_async[1]);
    failed |= find(get, "cuMemAllocManaged", 0, &driver.allocate_managed);
    failed |= find(get, "cuMemGetInfo", 0, &driver.info);
    failed |= find(get, "cuIpcGetMemHandle", 0, &driver.ipc_handle);
    failed |= find(get, "cuStreamCreate", 0, &driver.stream_create);
    failed |= find(get, "cuStreamDestroy", 0, &driver.stream_destroy);
    failed |= find(get, "cuStreamSynchronize", 0, &driver.stream_synchronize);
    failed |= find(get, "cuMemsetD8Async", 0, &driver.set_bytes);
    load_error = failed ? failed : driver.init(0);
}

/* Makes the thread's context current, as every function of the runtime does. */
static int begin(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    void *context = NULL;
    if (load_error)
        return load_error;
    int error = driver.get_current(&context);
    if (error || context)
        return error;
    error = driver.retain(&context, device);
    return error ? error : driver.set_current(context);
}

static int end(int error) {
    if (error)
        last_error = error;
    return error;
}

#define CALL(call)                                                                                         \
    int error = begin();                                                                                   \
    return end(error ? error : (call))

int cudaGetLastError(void) {
    int error = last_error;
    last_error = 0;
    return error;
}

int cudaSetDevice(int number) {
    void *context = NULL;
    device = number;
    int error = begin();
    if (!error)
        error = driver.retain(&context, number);
    return end(error ? error : driver.set_current(context));
}

int cudaMalloc(void **memory, size_t size) {
    /* The real one answers this itself, too. */
    if (memory && size == 0) {
        *memory = NULL;
        return 0;
    }
    CALL(driver.allocate((uint64_t *)memory, size));
}
int cudaFree(void *memory) { CALL(memory ? driver.release((uint64_t)memory) : 0); }
int cudaMallocAsync(void **memory, size_t size, void *stream) {
    CALL(driver.allocate_async[0]((uint64_t *)memory, size, stream));
}
int cudaFreeAsync(void *memory, void *stream) { CALL(driver.release_async[0]((uint64_t)memory, stream)); }
int cudaMallocAsync_ptsz(void **memory, size_t size, void *stream) {
    CALL(driver.allocate_async[1]((uint64_t *)memory, size, stream));
}
int cudaFreeAsync_ptsz(void *memory, void *stream) {
    CALL(driver.release_async[1]((uint64_t)memory, stream));
}
int cudaMallocManaged(void **memory, size_t size, unsigned flags) {
    CALL(driver.allocate_managed((uint64_t *)memory, size, flags));
}
int cudaMemGetInfo(size_t *free, size_t *total) { CALL(driver.info(free, total)); }
int cudaIpcGetMemHandle(void *handle, void *memory) { CALL(driver.ipc_handle(handle, (uint64_t)memory)); }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { CALL(driver.stream_create(stream, flags)); }
int cudaStreamDestroy(void *stream) { CALL(driver.stream_destroy(stream)); }
int cudaStreamSynchronize(void *stream) { CALL(driver.stream_synchronize(stream)); }
int cudaMemsetAsync(void *memory, int byte, size_t size, void *stream) {
    CALL(driver.set_bytes((uint64_t)memory, (unsigned char)byte, size, stream));
}
int cudaDeviceSynchronize(void) { CALL(driver.synchronize()); }
int cudaDeviceReset(void) {
    int error = begin();
    void *context = NULL;
    if (!error)
        error = driver.reset(device);
    if (!error)
        error = driver.set_current(context);
    return end(error);
}
