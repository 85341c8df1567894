/* What a test can ask of fakecuda beyond the CUDA driver's own functions.
 *
 * fakecuda is a libcuda.so.1 whose device memory is host memory. It exports the driver's functions
 * under their own names, so cuda.h or any binding declares those; this header declares the rest.
 * Every function may be called from any thread. Those that return an int return a CUresult, 0 for
 * success; what is not initialized by cuInit is CUDA_ERROR_NOT_INITIALIZED (3).
 *
 * Before cuInit the environment says the same:
 *   FAKECUDA_DEVICES=2               how many devices there are; 1 without it
 *   FAKECUDA_VISIBLE=1,0             which of them this process sees, and in which order; all without it
 *   FAKECUDA_CAPACITY=1073741824     the memory of each, in bytes; 8 GiB without it
 *   FAKECUDA_FAIL=cuMemMap:3,cuInit:1:100
 *                                    the 3rd cuMemMap fails, the 1st cuInit fails with code 100;
 *                                    read at the first call of the process
 */
#ifndef FAKECUDA_H
#define FAKECUDA_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Forgets everything: memory, contexts, streams with their work, events, counts, failures to come,
 * capacities and attributes. cuInit must be called again, and reads how many devices there are and
 * their capacity anew. Threads that wait in a call get CUDA_ERROR_DEINITIALIZED (4). */
void fakecuda_reset(void);

/* Sets how much memory a device has, in bytes. What is in use stays in use. */
int fakecuda_set_capacity(int device, uint64_t bytes);

/* Returns how many bytes of a device are in use: each cuMemCreate once, until it is released and
 * unmapped everywhere, and the pages of 2 MiB under allocations, which those smaller than a page
 * share. 0 for a device that is not there. */
uint64_t fakecuda_used_bytes(int device);

/* Sets what cuDeviceGetAttribute answers. cuMemCreate refuses, with CUDA_ERROR_NOT_SUPPORTED (801),
 * what attributes 102 (virtual memory), 103 (file descriptors) and 110 (GPUDirect RDMA) deny. */
int fakecuda_set_attribute(int device, unsigned int attribute, int value);

/* Makes the nth call of a function from now fail with `result`, once; 1 is the next call. The failing
 * call does nothing. `name` is the exported name: "cuMemAlloc_v2", "cuMemMap". Several failures may be
 * asked for; each counts every call. Returns 1 for a name that is not exported, for n = 0 and for
 * result 0. */
int fakecuda_fail(const char *name, uint64_t nth, int result);

/* Makes calls fail at random from now on, so many of a million, by a seed: those of cuMem... for lack of
 * memory (2) or, as all others, for an unknown reason (999). cuInit, cuDriverGetVersion,
 * cuGetProcAddress, cuGetErrorName and cuGetErrorString do not. */
void fakecuda_fail_at_random(uint64_t seed, uint64_t per_million);

/* Forgets all failures that were asked for and did not happen, those at random too. */
void fakecuda_fail_none(void);

/* Returns how often a function was called since the last reset, failed calls included. An empty name
 * stands for all functions. Calls before
 * cuInit count; calls from host functions and after the end of the program do not. */
uint64_t fakecuda_calls(const char *name);

/* Keeps a stream from starting its next task, until it is released. The task that runs goes on.
 * Work still queues up, and calls that wait for it wait, so another thread must release the stream
 * then. `stream` is a CUstream; null is the current context's legacy default stream. */
int fakecuda_hold_stream(void *stream);
int fakecuda_release_stream(void *stream);

/* Makes streams lazy, or (0) not any more. A lazy stream does only work that a call waits for or asks
 * about, and work that comes before that: all else runs as late as it can. So what is taken away under
 * work that nobody waited for is missed: mapped memory, and pinned memory of the host, as
 * cuMemHostUnregister does not wait meanwhile. Destroyed streams are lazy, too. */
int fakecuda_set_lazy(int is_lazy);

/* What was made and is still there. Default streams are not counted; a destroyed stream is until its
 * work is done. */
typedef struct fakecuda_live {
    uint64_t contexts;         /* primary contexts that are retained */
    uint64_t allocations;      /* cuMemAlloc, cuMemAllocAsync, cuMemAllocManaged, cuIpcOpenMemHandle */
    uint64_t reservations;     /* cuMemAddressReserve */
    uint64_t handles;          /* cuMemCreate, cuMemImportFromShareableHandle */
    uint64_t mappings;         /* cuMemMap */
    uint64_t host_allocations; /* cuMemHostAlloc, cuMemHostRegister */
    uint64_t streams;
    uint64_t events;
    uint64_t graphs; /* cuStreamEndCapture */
} fakecuda_live;

int fakecuda_get_live(fakecuda_live *live);

#ifdef __cplusplus
}
#endif

#endif
