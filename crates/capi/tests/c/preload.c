/* A program of its own right, which knows nothing of lowtide: it calls CUDA's runtime, or the stand-in for it,
 * and checks what CUDA promises. The argument names a check. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int cudaGetLastError(void);
int cudaSetDevice(int device);
int cudaMalloc(void **memory, size_t size);
int cudaFree(void *memory);
int cudaMallocAsync(void **memory, size_t size, void *stream);
int cudaFreeAsync(void *memory, void *stream);
int cudaMallocAsync_ptsz(void **memory, size_t size, void *stream);
int cudaFreeAsync_ptsz(void *memory, void *stream);
int cudaMallocManaged(void **memory, size_t size, unsigned flags);
int cudaMemGetInfo(size_t *free, size_t *total);
int cudaIpcGetMemHandle(void *handle, void *memory);
int cudaStreamCreateWithFlags(void **stream, unsigned flags);
int cudaStreamDestroy(void *stream);
int cudaStreamSynchronize(void *stream);
int cudaMemsetAsync(void *memory, int byte, size_t size, void *stream);
int cudaDeviceReset(void);

#define MIB ((size_t)1 << 20)
#define SUCCESS 0
#define INVALID_VALUE 1
#define OUT_OF_MEMORY 2
#define DEINITIALIZED 4
#define ILLEGAL_STATE 401
#define NOT_SUPPORTED 801
#define STREAM_CAPTURE_UNSUPPORTED 900
#define UNKNOWN 999
#define GLOBAL 0
#define RELAXED 2

#define CHECK(condition)                                                                                   \
    do {                                                                                                   \
        if (!(condition)) {                                                                                \
            fprintf(stderr, "%s:%d: %s\n", __func__, __LINE__, #condition);                                \
            exit(1);                                                                                       \
        }                                                                                                  \
    } while (0)

/* The stand-in for the driver, and what only it has. */
static void *driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    CHECK(library);
    return library;
}

static uint64_t calls(const char *name) {
    uint64_t (*count)(const char *);
    *(void **)&count = dlsym(driver(), "fakecuda_calls");
    return count(name);
}

static void hold(void *stream, const char *function) {
    int (*act)(void *);
    *(void **)&act = dlsym(driver(), function);
    CHECK(act(stream) == SUCCESS);
}

static void *stream(void) {
    void *stream = NULL;
    CHECK(cudaStreamCreateWithFlags(&stream, 1) == SUCCESS);
    return stream;
}

static void *memory(size_t size) {
    void *memory = NULL;
    CHECK(cudaMalloc(&memory, size) == SUCCESS && memory);
    return memory;
}

/* Releases a stream, a while after it was asked to, and says so first. */
struct delay {
    void *stream;
    volatile int is_over;
    pthread_t thread;
};

static void *end_delay(void *argument) {
    struct delay *delay = argument;
    usleep(100000);
    delay->is_over = 1;
    hold(delay->stream, "fakecuda_release_stream");
    return NULL;
}

static void begin_delay(struct delay *delay, void *held) {
    delay->stream = held;
    delay->is_over = 0;
    CHECK(pthread_create(&delay->thread, NULL, end_delay, delay) == 0);
}

static void loop(void) {
    for (int round = 0; round < 10000; round++)
        CHECK(cudaFree(memory(MIB)) == SUCCESS);
    printf("%d\n", (int)calls("cuMemAlloc_v2"));
}

/* Takes memory that it keeps, in functions of which the innermost is no part of the interface. */
__attribute__((noinline)) static void *weights(size_t size) {
    void *taken = memory(size);
    CHECK(taken);
    return taken;
}
static void *in_thread(void *argument) {
    CHECK(weights(3 * MIB));
    return argument;
}
static void stacks(void) {
    for (int round = 0; round < 3; round++) CHECK(weights(2 * MIB));
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, in_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

static void *fill(void *argument) {
    unsigned seed = (unsigned)(uintptr_t)argument;
    unsigned char *held[16] = {0};
    size_t sizes[16] = {0};
    unsigned char bytes[16] = {0};
    for (int round = 0; round < 3000; round++) {
        int place = rand_r(&seed) % 16;
        for (size_t byte = 0; byte < sizes[place]; byte += 97)
            CHECK(held[place][byte] == bytes[place]);
        CHECK(cudaFree(held[place]) == SUCCESS);
        sizes[place] = 1 + rand_r(&seed) % (round % 50 ? 20000 : 3 * MIB);
        bytes[place] = (unsigned char)rand_r(&seed);
        held[place] = memory(sizes[place]);
        memset(held[place], bytes[place], sizes[place]);
    }
    for (int place = 0; place < 16; place++)
        CHECK(cudaFree(held[place]) == SUCCESS);
    return NULL;
}

/* The first calls of the process come at once, too. */
static void threads(void) {
    pthread_t threads[8];
    for (uintptr_t index = 0; index < 8; index++)
        CHECK(pthread_create(&threads[index], NULL, fill, (void *)(index + 1)) == 0);
    for (int index = 0; index < 8; index++)
        pthread_join(threads[index], NULL);
}

static void odd_arguments(void) {
    void *nothing = (void *)1;
    CHECK(cudaFree(NULL) == SUCCESS);
    CHECK(cudaMalloc(&nothing, 0) == SUCCESS && nothing == NULL);
    CHECK(cudaMalloc(NULL, 1) == INVALID_VALUE && cudaGetLastError() == INVALID_VALUE);
    char *held = memory(MIB);
    CHECK(((uintptr_t)held & 255) == 0);
    CHECK(cudaFree(held + 512) == INVALID_VALUE && cudaGetLastError() == INVALID_VALUE);
    CHECK(cudaFreeAsync(held + 512, NULL) == INVALID_VALUE);
    CHECK(cudaFree(held) == SUCCESS);
    CHECK(cudaFree(held) == INVALID_VALUE);
    CHECK(cudaFree(&held) == INVALID_VALUE && cudaGetLastError() == INVALID_VALUE);
    CHECK(cudaGetLastError() == SUCCESS);
}

/* Memory that others allocated is theirs to free, and lowtide's theirs by no way. */
static void foreign(void) {
    void *managed = NULL;
    CHECK(cudaMallocManaged(&managed, MIB, 1) == SUCCESS);
    void *held = memory(MIB);
    memset(managed, 1, MIB);
    uint64_t frees = calls("cuMemFree_v2");
    CHECK(cudaFree(managed) == SUCCESS);
    CHECK(calls("cuMemFree_v2") == frees + 1);
    CHECK(cudaFree(held) == SUCCESS);
    CHECK(calls("cuMemFree_v2") == frees + 1);
}

/* Memory of each kind that the driver serves, ten times, and its free, after one that lowtide serves. */
static void left_to_driver(void) {
    int (*pitched)(uint64_t *, size_t *, size_t, size_t, unsigned);
    int (*from_pool[2])(uint64_t *, size_t, void *, void *);
    CHECK(cudaFree(memory(MIB)) == SUCCESS);
    *(void **)&pitched = dlsym(driver(), "cuMemAllocPitch_v2");
    *(void **)&from_pool[0] = dlsym(driver(), "cuMemAllocFromPoolAsync");
    *(void **)&from_pool[1] = dlsym(driver(), "cuMemAllocFromPoolAsync_ptsz");
    for (int round = 0; round < 10; round++) {
        void *managed = NULL;
        uint64_t address = 0;
        size_t pitch = 0;
        CHECK(cudaMallocManaged(&managed, MIB, 1) == SUCCESS && cudaFree(managed) == SUCCESS);
        CHECK(pitched(&address, &pitch, 512, 4, 4) == SUCCESS && cudaFree((void *)address) == SUCCESS);
        for (int kind = 0; kind < 2; kind++) {
            CHECK(from_pool[kind](&address, MIB, NULL, NULL) == SUCCESS);
            CHECK(cudaFreeAsync((void *)address, NULL) == SUCCESS);
        }
    }
}

/* Work in any stream may use memory that is freed. */
static void free_waits(void) {
    void *held = stream(), *used = memory(MIB);
    struct delay delay;
    hold(held, "fakecuda_hold_stream");
    CHECK(cudaMemsetAsync(used, 7, MIB, held) == SUCCESS);
    begin_delay(&delay, held);
    CHECK(cudaFree(used) == SUCCESS);
    CHECK(delay.is_over);
    pthread_join(delay.thread, NULL);
    CHECK(*(char *)memory(MIB) == 7);
}

static void *allocate_in_order(size_t size, void *stream) {
    void *memory = NULL;
    CHECK(cudaMallocAsync(&memory, size, stream) == SUCCESS && memory);
    return memory;
}

static void stream_order(void) {
    void *first = stream(), *second = stream();
    hold(first, "fakecuda_hold_stream");
    hold(second, "fakecuda_hold_stream");
    void *held = allocate_in_order(MIB, first);
    CHECK(cudaMemsetAsync(held, 1, MIB, first) == SUCCESS);
    CHECK(cudaFreeAsync(held, first) == SUCCESS);
    CHECK(allocate_in_order(MIB, first) == held);
    CHECK(allocate_in_order(MIB, second) != held);
    CHECK(memory(MIB) != held);
    /* Freed in another stream's order, it waits for that one. */
    CHECK(cudaMemsetAsync(held, 2, MIB, second) == SUCCESS);
    CHECK(cudaFreeAsync(held, second) == SUCCESS);
    CHECK(cudaFreeAsync(held, second) == INVALID_VALUE);
    void *other = allocate_in_order(MIB, first);
    CHECK(other != held);
    hold(second, "fakecuda_release_stream");
    CHECK(cudaStreamSynchronize(second) == SUCCESS);
    CHECK(allocate_in_order(MIB, first) == held);
    hold(first, "fakecuda_release_stream");
    /* Memory that any stream may use, freed in the order of one. */
    void *anyones = memory(3 * MIB);
    hold(first, "fakecuda_hold_stream");
    CHECK(cudaMemsetAsync(anyones, 3, MIB, first) == SUCCESS);
    CHECK(cudaFreeAsync(anyones, first) == SUCCESS);
    CHECK(memory(3 * MIB) != anyones);
    hold(first, "fakecuda_release_stream");
    CHECK(cudaStreamSynchronize(first) == SUCCESS);
    CHECK(memory(3 * MIB) == anyones);
    /* The other way round. */
    CHECK(cudaFree(held) == SUCCESS);
    CHECK(allocate_in_order(MIB, first) == held);
}

static void *own_default_stream(void *taken) {
    void *held = NULL, *again = NULL;
    CHECK(cudaMallocAsync_ptsz(&held, MIB, NULL) == SUCCESS);
    CHECK(held != taken);
    CHECK(cudaFreeAsync_ptsz(held, NULL) == SUCCESS);
    CHECK(cudaMallocAsync(&again, MIB, (void *)2) == SUCCESS);
    CHECK(again == held);
    CHECK(cudaFreeAsync(again, (void *)2) == SUCCESS);
    return held;
}

/* Each thread's own default stream has the same handle. */
static void threads_own_streams(void) {
    void *first = own_default_stream(NULL), *second = NULL;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, own_default_stream, first) == 0);
    pthread_join(thread, &second);
    CHECK(second && second != first);
    CHECK(own_default_stream(NULL) == first);
}

/* The next stream may have the handle of one that still works. */
static void destroyed_stream(void) {
    void *held = stream();
    void *used = allocate_in_order(MIB, held);
    struct delay delay;
    hold(held, "fakecuda_hold_stream");
    CHECK(cudaMemsetAsync(used, 7, MIB, held) == SUCCESS);
    CHECK(cudaFreeAsync(used, held) == SUCCESS);
    begin_delay(&delay, held);
    CHECK(cudaStreamDestroy(held) == SUCCESS);
    CHECK(delay.is_over);
    pthread_join(delay.thread, NULL);
}

/* Nobody can tell whether its work is done, so that the next stream must not have its handle. */
static void stream_that_stays(void) {
    int (*fail)(const char *, uint64_t, int);
    void *held = stream();
    void *used = allocate_in_order(MIB, held);
    *(void **)&fail = dlsym(driver(), "fakecuda_fail");
    CHECK(fail("cuStreamSynchronize", 1, UNKNOWN) == SUCCESS);
    CHECK(cudaStreamDestroy(held) == UNKNOWN);
    CHECK(fail("cuStreamIsCapturing", 1, UNKNOWN) == SUCCESS);
    CHECK(cudaStreamDestroy(held) == UNKNOWN);
    CHECK(cudaMemsetAsync(used, 7, MIB, held) == SUCCESS);
    CHECK(cudaFreeAsync(used, held) == SUCCESS);
    CHECK(cudaStreamDestroy(held) == SUCCESS);
}

/* A free waits for the device, which must not spoil a capture that CUDA's own free would not. */
static void captures(void) {
    int (*begin)(void *, unsigned), (*end)(void *, void **);
    void *held = stream(), *used = memory(MIB), *taken = NULL, *graph = NULL;
    *(void **)&begin = dlsym(driver(), "cuStreamBeginCapture_v2");
    *(void **)&end = dlsym(driver(), "cuStreamEndCapture");
    void *ordered = allocate_in_order(MIB, held);
    CHECK(begin(held, RELAXED) == SUCCESS);
    CHECK(cudaFree(used) == SUCCESS && memory(MIB) == used);
    CHECK(cudaFreeAsync(ordered, held) == STREAM_CAPTURE_UNSUPPORTED);
    CHECK(end(held, &graph) == SUCCESS && graph);
    CHECK(begin(held, GLOBAL) == SUCCESS);
    CHECK(cudaFree(used) == STREAM_CAPTURE_UNSUPPORTED);
    CHECK(end(held, &graph) != SUCCESS);
    CHECK(end(held, &graph) == ILLEGAL_STATE);
    uint64_t before = calls("cuMemFree_v2");
    CHECK(cudaFree(used) == SUCCESS && cudaFreeAsync(ordered, held) == SUCCESS);
    CHECK(calls("cuMemFree_v2") == before);
    CHECK(cudaMalloc(&taken, MIB) == SUCCESS && taken == used);
}

/* The same on a device without a byte left. It has 64 MiB. */
static void captures_when_full(void) {
    int (*begin)(void *, unsigned), (*end)(void *, void **);
    void *held = stream(), *used = memory(40 * MIB), *graph = NULL;
    *(void **)&begin = dlsym(driver(), "cuStreamBeginCapture_v2");
    *(void **)&end = dlsym(driver(), "cuStreamEndCapture");
    void *work = stream();
    struct delay delay;
    for (int round = 0; round < 3; round++) {
        CHECK(begin(held, RELAXED) == SUCCESS);
        void *rest = NULL;
        for (size_t size = 32 * MIB; size >= 512; size /= 2)
            while (cudaMalloc(&rest, size) == SUCCESS)
                ;
        hold(work, "fakecuda_hold_stream");
        CHECK(cudaMemsetAsync(used, 7, MIB, work) == SUCCESS);
        begin_delay(&delay, work);
        CHECK(cudaFree(used) == SUCCESS);
        CHECK(delay.is_over);
        pthread_join(delay.thread, NULL);
        CHECK(end(held, &graph) == SUCCESS && graph);
        used = memory(40 * MIB);
    }
}

static void failed_work(void) {
    void *held = stream(), *used = NULL;
    CHECK(cudaMallocAsync(&used, MIB, held) == SUCCESS);
    CHECK(cudaFreeAsync(used, held) == 700);
    CHECK(cudaFreeAsync(used, held) == SUCCESS);
}

/* The device has 64 MiB. */
static void out_of_memory(void) {
    void *held = memory(40 * MIB), *more = (void *)1;
    CHECK(cudaMalloc(&more, 40 * MIB) == OUT_OF_MEMORY);
    CHECK(cudaGetLastError() == OUT_OF_MEMORY && cudaGetLastError() == SUCCESS);
    CHECK(cudaMallocAsync(&more, 40 * MIB, NULL) == OUT_OF_MEMORY && more == (void *)1);
    CHECK(cudaMalloc(&more, (size_t)1 << 50) == OUT_OF_MEMORY);
    memset(held, 1, 40 * MIB);
    CHECK(cudaFree(held) == SUCCESS);
    CHECK(cudaFree(memory(60 * MIB)) == SUCCESS);
    /* What is kept goes back for memory that is not lowtide's. */
    int (*create)(uint64_t *, size_t, const void *, uint64_t);
    *(void **)&create = dlsym(driver(), "cuMemCreate");
    struct { int kind, handle_types, location, device; void *none; unsigned char flags[8]; } properties = {1, 0, 1, 0, 0, {0}};
    uint64_t handle = 0;
    CHECK(create(&handle, 60 * MIB, &properties, 0) == SUCCESS);
    CHECK(cudaMalloc(&more, 10 * MIB) == OUT_OF_MEMORY);
}

static void free_memory(void) {
    size_t before, during, after, total;
    CHECK(cudaFree(NULL) == SUCCESS && cudaMemGetInfo(&before, &total) == SUCCESS);
    void *held = memory(30 * MIB);
    CHECK(cudaMemGetInfo(&during, NULL) == INVALID_VALUE);
    CHECK(cudaMemGetInfo(&during, &total) == SUCCESS);
    CHECK(before - during == 30 * MIB);
    CHECK(cudaFree(held) == SUCCESS && cudaMemGetInfo(&after, &total) == SUCCESS);
    CHECK(after == before && calls("cuMemFree_v2") == 0);
}

/* What of a region's memory is in no block is not counted twice while the region is paused. */
static void free_memory_of_regions(void) {
    int (*enter)(const char *, int), (*leave)(void), (*pause)(const char *), (*resume)(const char *);
    *(void **)&enter = dlsym(RTLD_DEFAULT, "lowtide_region_enter");
    *(void **)&leave = dlsym(RTLD_DEFAULT, "lowtide_region_leave");
    *(void **)&pause = dlsym(RTLD_DEFAULT, "lowtide_pause");
    *(void **)&resume = dlsym(RTLD_DEFAULT, "lowtide_resume");
    size_t at_start, free, total;
    CHECK(cudaFree(memory(MIB)) == SUCCESS);
    CHECK(cudaMemGetInfo(&at_start, &total) == SUCCESS && at_start == total);
    CHECK(enter("region", 1) == SUCCESS);
    void *blocks[16];
    for (int index = 0; index < 16; index++)
        blocks[index] = memory(MIB / 2);
    CHECK(leave() == SUCCESS);
    for (int index = 1; index < 8; index++)
        CHECK(cudaFree(blocks[index]) == SUCCESS);
    CHECK(pause("region") == SUCCESS && cudaMemGetInfo(&free, &total) == SUCCESS && free == total);
    for (int index = 9; index < 15; index++)
        CHECK(cudaFree(blocks[index]) == SUCCESS);
    CHECK(cudaMemGetInfo(&free, &total) == SUCCESS && free == total);
    CHECK(resume("region") == SUCCESS && cudaMemGetInfo(&free, &total) == SUCCESS && free < total);
}

static void other_processes(void) {
    char handle[64];
    char *first = memory(4096), *second = memory(4096);
    CHECK(cudaIpcGetMemHandle(handle, first) == SUCCESS);
    CHECK(cudaIpcGetMemHandle(handle, second) == NOT_SUPPORTED);
    CHECK(cudaGetLastError() == NOT_SUPPORTED);
}

static void reset(void) {
    CHECK(cudaFree(memory(MIB)) == SUCCESS);
    void *lost = memory(MIB);
    CHECK(cudaDeviceReset() == SUCCESS);
    uint64_t before = calls("cuMemAlloc_v2");
    char *held = memory(MIB);
    CHECK(calls("cuMemAlloc_v2") == before + 1);
    memset(held, 1, MIB);
    CHECK(cudaFree(held) == SUCCESS);
    CHECK(lost == held || cudaFree(lost) == INVALID_VALUE);
}

static void devices(void) {
    char *first = memory(MIB);
    CHECK(cudaSetDevice(1) == SUCCESS);
    char *second = memory(MIB);
    /* Another device's memory may be freed. */
    CHECK(cudaFree(first) == SUCCESS);
    CHECK(memory(MIB) != first);
    CHECK(cudaSetDevice(0) == SUCCESS);
    CHECK(memory(MIB) == first);
    CHECK(cudaFreeAsync(second, NULL) == SUCCESS);
    CHECK(cudaSetDevice(1) == SUCCESS && memory(MIB) == second);
}

/* `dlsym` is the C library's for all else, which looks at who calls. */
__attribute__((visibility("default"))) void preload_marker(void) {}

static void looks_up(void) {
    CHECK(cudaFree(NULL) == SUCCESS);
    void *library = dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
    CHECK(library && dlsym(library, "puts") && dlsym(library, "puts") == dlsym(RTLD_DEFAULT, "puts"));
    CHECK(dlsym(RTLD_NEXT, "puts") == dlsym(library, "puts"));
    CHECK(dlsym(RTLD_DEFAULT, "preload_marker") == (void *)preload_marker);
    CHECK(dlsym(RTLD_NEXT, "preload_marker") == NULL && dlerror());
    CHECK(dlsym(library, "cuMemAlloc_v2") == NULL && strstr(dlerror(), "cuMemAlloc_v2"));
    CHECK(dlsym(driver(), "cuNothing") == NULL && dlerror() && !dlerror());
    /* As cudarc and CuPy find the driver: by its names. */
    int (*allocate)(uint64_t *, size_t), (*release)(uint64_t);
    *(void **)&allocate = dlsym(driver(), "cuMemAlloc_v2");
    *(void **)&release = dlsym(driver(), "cuMemFree_v2");
    uint64_t address = 0, before = calls("cuMemAlloc_v2");
    for (int round = 0; round < 100; round++)
        CHECK(allocate(&address, MIB) == SUCCESS && release(address) == SUCCESS);
    CHECK(calls("cuMemAlloc_v2") == before + 1);
    CHECK(allocate(&address, 0) == INVALID_VALUE && release(0) == SUCCESS);
}

/* Whoever names no library finds the driver where it would without lowtide. */
static void looks_up_nowhere(void) {
    CHECK(dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") == NULL && strstr(dlerror(), "cuMemAlloc_v2"));
    CHECK(dlsym(RTLD_NEXT, "cuMemAlloc_v2") == NULL && dlerror());
    /* The runtime opens it for itself. */
    CHECK(cudaFree(NULL) == SUCCESS);
    CHECK(dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") == NULL && dlerror());
    CHECK(dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL));
    CHECK(dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") == dlsym(driver(), "cuMemAlloc_v2"));
    CHECK(dlsym(RTLD_DEFAULT, "cuMemAlloc_v2"));
}

/* The device has 64 MiB, and what the driver keeps there of code and graphs takes most of it. */
static void other_needs(void) {
    static const char *const names[] = {
        "cuMipmappedArrayCreate", "cuModuleLoad", "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary",
        "cuModuleGetFunction", "cuLibraryLoadData", "cuLibraryLoadFromFile", "cuLibraryGetModule",
        "cuKernelGetFunction", "cuCtxSetLimit", "cuGraphInstantiate_v2", "cuGraphInstantiateWithFlags",
        "cuGraphInstantiateWithParams", "cuGraphInstantiateWithParams_ptsz", "cuGraphUpload", "cuGraphUpload_ptsz",
    };
    for (size_t index = 0; index < sizeof names / sizeof *names; index++) {
        int (*act)(void *, void *, void *, void *, void *, void *, void *, void *);
        CHECK(cudaFree(memory(60 * MIB)) == SUCCESS);
        *(void **)&act = dlsym(driver(), names[index]);
        CHECK(act && act(NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL) == SUCCESS);
        void *held = memory(60 * MIB);
        CHECK(act(NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL) == OUT_OF_MEMORY);
        CHECK(cudaFree(held) == SUCCESS);
    }
}

/* Without CUDA's part in it a child is a child; one that becomes a program is that program. */
static void children(const char *program) {
    CHECK(cudaFree(memory(MIB)) == SUCCESS);
    fflush(NULL);
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        void *held = NULL;
        int error = cudaMalloc(&held, MIB);
        exit(error == SUCCESS || held ? 1 : 0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    child = fork();
    if (child == 0) {
        execl(program, program, "loop", NULL);
        _exit(1);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(cudaFree(memory(MIB)) == SUCCESS);
}

/* Loaded by hand, lowtide stands in for nothing. */
static void passes_on(void) {
    const char *path = getenv("TEST_LIBRARY");
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    CHECK(cudaFree(memory(MIB)) == SUCCESS && library);
    int (*allocate)(uint64_t *, size_t), (*release)(uint64_t);
    *(void **)&allocate = dlsym(library, "cuMemAlloc_v2");
    *(void **)&release = dlsym(library, "cuMemFree_v2");
    CHECK(allocate && *(void **)&allocate != dlsym(driver(), "cuMemAlloc_v2"));
    uint64_t address = 0, before = calls("cuMemAlloc_v2");
    for (int round = 0; round < 100; round++)
        CHECK(allocate(&address, MIB) == SUCCESS && release(address) == SUCCESS);
    CHECK(calls("cuMemAlloc_v2") == before + 100);
}

/* A file by the number of standard error is the program's. */
static void closes_standard_error(void) {
    memory(MIB);
    int file = open(getenv("TEST_FILE"), O_CREAT | O_RDWR, 0600);
    /* In one step: another thread may open something meanwhile. */
    CHECK(file > 2 && dup2(file, 2) == 2 && close(file) == 0);
}

/* Libraries allocate before `main`, and free after it. */
static void *early;
__attribute__((constructor)) static void before_main(void) {
    if (getenv("TEST_EARLY"))
        early = memory(MIB);
}
__attribute__((destructor)) static void after_main(void) {
    /* The driver has ended before, and says so. */
    if (early && cudaFree(early) != DEINITIALIZED)
        _exit(1);
}
static void at_the_ends(void) { CHECK(early && cudaFree(memory(MIB)) == SUCCESS); }

int main(int count, char **arguments) {
    static const struct { const char *name; void (*run)(void); } checks[] = {
        {"loop", loop}, {"stacks", stacks}, {"threads", threads}, {"odd_arguments", odd_arguments}, {"foreign", foreign},
        {"free_waits", free_waits}, {"stream_order", stream_order}, {"threads_own_streams", threads_own_streams},
        {"destroyed_stream", destroyed_stream}, {"stream_that_stays", stream_that_stays}, {"out_of_memory", out_of_memory}, {"free_memory", free_memory},
        {"other_processes", other_processes}, {"reset", reset}, {"devices", devices}, {"looks_up", looks_up}, {"captures", captures},
        {"passes_on", passes_on}, {"at_the_ends", at_the_ends},
        {"failed_work", failed_work}, {"looks_up_nowhere", looks_up_nowhere}, {"other_needs", other_needs},
        {"captures_when_full", captures_when_full}, {"free_memory_of_regions", free_memory_of_regions},
        {"closes_standard_error", closes_standard_error}, {"left_to_driver", left_to_driver},
    };
    if (count == 2 && strcmp(arguments[1], "children") == 0) {
        children(arguments[0]);
        return 0;
    }
    for (size_t index = 0; count == 2 && index < sizeof checks / sizeof *checks; index++)
        if (strcmp(arguments[1], checks[index].name) == 0) {
            checks[index].run();
            return 0;
        }
    return 2;
}
