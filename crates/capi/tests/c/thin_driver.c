/* A driver as Windows' subsystem for Linux has it: a library that programs open, and the one behind it, which it
 * looks its functions up in by name. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

static void *behind(const char *name) { return dlsym(dlopen("libcuda.so.1.1", RTLD_NOW), name); }

int cuMemAlloc_v2(uint64_t *memory, size_t size) {
    int (*real)(uint64_t *, size_t);
    *(void **)&real = behind("cuMemAlloc_v2");
    return real(memory, size);
}

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, unsigned *status) {
    int (*real)(const char *, void **, int, uint64_t, unsigned *);
    *(void **)&real = behind("cuGetProcAddress_v2");
    return real(symbol, function, version, flags, status);
}
