/* What the files of this directory share. Together they are a CUDA runtime whose memory, streams, events and captures
 * are those of whatever libcuda.so.1 there is, and whose kernels do nothing. */
#ifndef LOWTIDE_FAKERUNTIME_H
#define LOWTIDE_FAKERUNTIME_H

#include <cuda.h>
#include <cuda_runtime_api.h>

#define STRING_OF(text) #text
#define STRING(text) STRING_OF(text)

/* The driver's function of this name, in the version that <cuda.h> gives it. */
#define DRIVER(function)                                          \
    ({                                                            \
        static __typeof__(&function) found;                       \
        if (!found) {                                             \
            found = (__typeof__(found))driver_function(STRING(function)); \
        }                                                         \
        found;                                                    \
    })

/* Returns what a call ended with, and notes it for cudaGetLastError. The two lists of errors have the same numbers. */
#define FINISH(result) finish((cudaError_t)(result))

/* Begins a function that needs a context: the thread's own, or the primary one of its device, which stays current.
 * The runtime of CUDA 13.0 was seen to need none, on an H100, for questions about devices, pointers and events. */
#define WITH_CONTEXT                         \
    do {                                     \
        cudaError_t entered = enter();       \
        if (entered != cudaSuccess) {        \
            return finish(entered);          \
        }                                    \
    } while (0)

#pragma GCC visibility push(hidden)

/* Returns a function of the driver's, or one that returns CUDA_ERROR_NOT_SUPPORTED. */
void *driver_function(const char *name);

/* As driver_function, but null where there is none. */
void *find_driver_function(const char *name);

cudaError_t finish(cudaError_t error);
cudaError_t enter(void);

/* Makes the primary context of a device, if need be, and the thread's. */
cudaError_t enter_device(int device);

#pragma GCC visibility pop

#endif
