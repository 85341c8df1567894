/* The driver's functions for programs that ask the runtime for them. */
#include "runtime.h"

#include <stddef.h>
#include <stdio.h>

#undef cudaGetDriverEntryPoint

/* Versions of a function that came later are not for programs that were built before. */
static const struct {
    const char *suffix;
    unsigned since;
} FORMS[] = {{"_v3", 12030}, {"_v2", 0}, {"", 0}};

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    *function = NULL;
    for (size_t i = 0; i < sizeof FORMS / sizeof *FORMS && !*function; i++) {
        char form[128];
        snprintf(form, sizeof form, "%s%s", name, FORMS[i].suffix);
        if (version >= FORMS[i].since) {
            *function = find_driver_function(form);
        }
    }
    if (!*function) {
        *function = driver_function(name);
    }
    if (result) {
        *result = cudaDriverEntryPointSuccess;
    }
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, result);
}
