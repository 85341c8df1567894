/* A program that uses CUDA, linked against libcuda.so.1 as such programs are. Its first argument says
 * which test of tests/driver/process.rs it is for; it prints what that test looks at. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fakecuda.h"

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct { int type, id; } CUmemLocation;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    unsigned char allocFlags[8];
} CUmemAllocationProp;
typedef struct { char reserved[64]; } CUipcMemHandle;

CUresult cuInit(unsigned int flags);
CUresult cuDeviceGetCount(int *count);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuMemGetInfo_v2(size_t *free, size_t *total);
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr address);
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags);
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *properties, unsigned long long flags);
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags);
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access,
                        size_t count);
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        int type);
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags);
CUresult cuIpcCloseMemHandle(CUdeviceptr address);

static const size_t page = 2 << 20;

static void check(CUresult result, const char *call) {
    if (result != 0) {
        fprintf(stderr, "%s: %d\n", call, result);
        exit(1);
    }
}
#define CHECK(call) check(call, #call)

static void start(void) {
    CUcontext context;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
}

/* Maps a handle at new addresses, for device 0 if `flags` says so. */
static char *map(CUmemGenericAllocationHandle handle, int flags) {
    CUdeviceptr address;
    CUmemAccessDesc access = {{1, 0}, flags};
    CHECK(cuMemAddressReserve(&address, page, 0, 0, 0));
    CHECK(cuMemMap(address, page, 0, handle, 0));
    CHECK(cuMemSetAccess(address, page, &access, 1));
    return (char *)(uintptr_t)address;
}

static CUdeviceptr allocated;

static void free_at_exit(void) {
    printf("freed: %d\n", cuMemFree_v2(allocated));
    fflush(stdout);
}

/* Handlers run last in, first out: one before the driver ends, one after. */
static void exit_handlers(void) {
    atexit(free_at_exit);
    start();
    CHECK(cuMemAlloc_v2(&allocated, page));
    atexit(free_at_exit);
}

static void forked(void) {
    int count;
    start();
    if (fork() == 0) {
        printf("child: %d %d\n", cuDeviceGetCount(&count), cuInit(0));
        fflush(stdout);
        _exit(0);
    }
    wait(NULL);
    printf("parent: %d\n", cuDeviceGetCount(&count));
}

static void fault(void) {
    CUmemAllocationProp properties = {1, 0, {1, 0}, NULL, {0}};
    CUmemGenericAllocationHandle handle;
    start();
    CHECK(cuMemCreate(&handle, page, &properties, 0));
    map(handle, 3)[page - 1] = 1;
    volatile char *protected = map(handle, 1);
    printf("read: %d\n", protected[page - 1]);
    fflush(stdout);
    protected[page - 1] = 2;
    printf("written\n");
}

static void environment(void) {
    CUmemAllocationProp properties = {1, 0, {1, 0}, NULL, {0}};
    CUmemGenericAllocationHandle handle;
    int count = 0, result = cuInit(0);
    printf("init: %d\n", result);
    if (result != 0)
        return;
    start();
    size_t free_bytes, total_bytes;
    CHECK(cuMemGetInfo_v2(&free_bytes, &total_bytes));
    CHECK(cuDeviceGetCount(&count));
    printf("devices: %d of %zu\n", count, total_bytes);
    for (int call = 1; call <= 3; call++)
        printf("create: %d\n", cuMemCreate(&handle, page, &properties, 0));
    fakecuda_live live;
    CHECK(fakecuda_get_live(&live));
    printf("live: %d handles, %d bytes, %d calls\n", (int)live.handles,
           (int)fakecuda_used_bytes(0), (int)fakecuda_calls("cuMemCreate"));
}

/* More memory than the process may have files, as its limit is at first. */
static void many(void) {
    CUmemAllocationProp properties = {1, 0, {1, 0}, NULL, {0}};
    CUmemGenericAllocationHandle handle;
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = 50;
    setrlimit(RLIMIT_NOFILE, &limit);
    start();
    for (int call = 0; call < 200; call++)
        CHECK(cuMemCreate(&handle, page, &properties, 0));
}

/* Adds one to the first byte of an allocation of the parent. */
static void open_allocation(const char *hexadecimal) {
    CUipcMemHandle handle;
    CUdeviceptr address, again;
    for (int index = 0; index < 64; index++) {
        unsigned int byte;
        sscanf(hexadecimal + 2 * index, "%2x", &byte);
        handle.reserved[index] = (char)byte;
    }
    start();
    CHECK(cuIpcOpenMemHandle_v2(&address, handle, 1));
    CHECK(cuIpcOpenMemHandle_v2(&again, handle, 1));
    ++*(char *)(uintptr_t)address;
    printf("same: %d\n", address == again);
    printf("closed: %d", cuIpcCloseMemHandle(address));
    printf(" %d", cuIpcCloseMemHandle(address));
    printf(" %d\n", cuIpcCloseMemHandle(address));
    printf("used: %d\n", (int)fakecuda_used_bytes(0));
}

/* Adds one to the first byte of a handle of the parent. */
static void import_handle(const char *descriptor) {
    CUmemGenericAllocationHandle handle;
    start();
    CHECK(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)atoi(descriptor), 1));
    ++*map(handle, 3);
    printf("used: %d\n", (int)fakecuda_used_bytes(0));
}

int main(int count, char **arguments) {
    const char *test = count > 1 ? arguments[1] : "";
    if (strcmp(test, "exit") == 0)
        exit_handlers();
    else if (strcmp(test, "fork") == 0)
        forked();
    else if (strcmp(test, "fault") == 0)
        fault();
    else if (strcmp(test, "environment") == 0)
        environment();
    else if (strcmp(test, "many") == 0)
        many();
    else if (strcmp(test, "open") == 0 && count > 2)
        open_allocation(arguments[2]);
    else if (strcmp(test, "import") == 0 && count > 2)
        import_handle(arguments[2]);
    else
        return 2;
    return 0;
}
