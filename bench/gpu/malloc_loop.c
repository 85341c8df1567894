/* Nanoseconds for a pair of cudaMalloc and cudaFree, and of their forms in stream order, in a loop.
 *
 *     cc -O2 bench/gpu/malloc_loop.c -ldl -o malloc_loop
 *     ./malloc_loop [PAIRS]
 *     lowtide run --preload ./malloc_loop [PAIRS]
 *
 * CUDA's runtime is opened when the program runs, so nothing of CUDA is needed to compile it. `LIBCUDART` in
 * the environment names the library where it is not among the loader's.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static int (*cuda_malloc)(void **, size_t);
static int (*cuda_free)(void *);
static int (*cuda_malloc_async)(void **, size_t, void *);
static int (*cuda_free_async)(void *, void *);
static int (*cuda_memset)(void *, int, size_t);
static int (*cuda_synchronize)(void);
static int (*cuda_info)(size_t *, size_t *);

static void check(const char *call, int error) {
    if (error) {
        fprintf(stderr, "%s: error %d\n", call, error);
        exit(1);
    }
}

static void *open_runtime(void) {
    const char *names[] = {getenv("LIBCUDART"), "libcudart.so.13", "libcudart.so.12", "libcudart.so"};
    for (size_t index = 0; index < sizeof names / sizeof *names; index++) {
        void *library = names[index] ? dlopen(names[index], RTLD_NOW) : NULL;
        if (library)
            return library;
    }
    fprintf(stderr, "no libcudart.so: %s\n", dlerror());
    exit(1);
}

static void find(void *library, const char *name, void *function) {
    *(void **)function = dlsym(library, name);
    if (!*(void **)function) {
        fprintf(stderr, "no %s\n", name);
        exit(1);
    }
}

static double now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static void pair(size_t size) {
    void *memory = NULL;
    check("cudaMalloc", cuda_malloc(&memory, size));
    check("cudaFree", cuda_free(memory));
}

static void pair_async(size_t size) {
    void *memory = NULL;
    check("cudaMallocAsync", cuda_malloc_async(&memory, size, NULL));
    check("cudaFreeAsync", cuda_free_async(memory, NULL));
}

/* A pair with a small kernel in between, for which cudaFree waits. */
static void pair_used(size_t size) {
    void *memory = NULL;
    check("cudaMalloc", cuda_malloc(&memory, size));
    check("cudaMemset", cuda_memset(memory, 1, size < 4096 ? size : 4096));
    check("cudaFree", cuda_free(memory));
}

static double ns_per_pair(void (*pair)(size_t), size_t size, int pairs) {
    for (int round = 0; round < 10; round++)
        pair(size);
    check("cudaDeviceSynchronize", cuda_synchronize());
    double start = now_ns();
    for (int round = 0; round < pairs; round++)
        pair(size);
    double time = now_ns() - start;
    check("cudaDeviceSynchronize", cuda_synchronize());
    return time / pairs;
}

int main(int count, char **arguments) {
    int pairs = count > 1 ? atoi(arguments[1]) : 10000;
    void *library = open_runtime();
    find(library, "cudaMalloc", &cuda_malloc);
    find(library, "cudaFree", &cuda_free);
    find(library, "cudaMallocAsync", &cuda_malloc_async);
    find(library, "cudaFreeAsync", &cuda_free_async);
    find(library, "cudaMemset", &cuda_memset);
    find(library, "cudaDeviceSynchronize", &cuda_synchronize);
    find(library, "cudaMemGetInfo", &cuda_info);
    size_t before, after, total;
    check("cudaFree", cuda_free(NULL));
    check("cudaMemGetInfo", cuda_info(&before, &total));
    printf("%10s %14s %14s %14s   ns per pair, %d pairs each\n", "bytes", "cudaMalloc", "and a memset",
           "in stream order", pairs);
    for (size_t size = 4096; size <= (size_t)1 << 30; size *= 8)
        printf("%10zu %14.0f %14.0f %14.0f\n", size, ns_per_pair(pair, size, pairs),
               ns_per_pair(pair_used, size, pairs), ns_per_pair(pair_async, size, pairs));
    check("cudaMemGetInfo", cuda_info(&after, &total));
    printf("free memory: %zu MiB before, %zu MiB after\n", before >> 20, after >> 20);
    return 0;
}
