/* What a driver has besides memory: calls that take more of the device than is there, unless nearly all is free; and
 * memory of further kinds. In front of the stand-in, whose functions it looks up by name. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#define OUT_OF_MEMORY 2
#define NEEDED ((size_t)50 << 20)

static void *behind(const char *name) { return dlsym(dlopen("libcuda.so.1.1", RTLD_NOW), name); }

static int take(void) {
    size_t free = 0, total = 0;
    int (*info)(size_t *, size_t *);
    *(void **)&info = behind("cuMemGetInfo_v2");
    return info(&free, &total) == 0 && free >= NEEDED ? 0 : OUT_OF_MEMORY;
}

#define TAKES_MEMORY(name)                                                                                 \
    int name(void) { return take(); }

TAKES_MEMORY(cuMipmappedArrayCreate)
TAKES_MEMORY(cuModuleLoad)
TAKES_MEMORY(cuModuleLoadData)
TAKES_MEMORY(cuModuleLoadDataEx)
TAKES_MEMORY(cuModuleLoadFatBinary)
TAKES_MEMORY(cuModuleGetFunction)
TAKES_MEMORY(cuLibraryLoadData)
TAKES_MEMORY(cuLibraryLoadFromFile)
TAKES_MEMORY(cuLibraryGetModule)
TAKES_MEMORY(cuKernelGetFunction)
TAKES_MEMORY(cuCtxSetLimit)
TAKES_MEMORY(cuGraphInstantiate_v2)
TAKES_MEMORY(cuGraphInstantiateWithFlags)
TAKES_MEMORY(cuGraphInstantiateWithParams)
TAKES_MEMORY(cuGraphInstantiateWithParams_ptsz)
TAKES_MEMORY(cuGraphUpload)
TAKES_MEMORY(cuGraphUpload_ptsz)

int cuMemAllocPitch_v2(uint64_t *memory, size_t *pitch, size_t width, size_t height, unsigned element) {
    int (*allocate)(uint64_t *, size_t);
    *(void **)&allocate = behind("cuMemAlloc_v2");
    *pitch = (width + element - 1) / element * element;
    return allocate(memory, *pitch * height);
}

/* By a macro, as the loader would have a call of the one by the other go to whoever stands in for that. */
#define ALLOCATES_FROM_POOL(name)                                                                          \
    int name(uint64_t *memory, size_t size, void *pool, void *stream) {                                    \
        int (*allocate)(uint64_t *, size_t, void *);                                                       \
        *(void **)&allocate = behind("cuMemAllocAsync");                                                   \
        return pool ? OUT_OF_MEMORY : allocate(memory, size, stream);                                      \
    }

ALLOCATES_FROM_POOL(cuMemAllocFromPoolAsync)
ALLOCATES_FROM_POOL(cuMemAllocFromPoolAsync_ptsz)
