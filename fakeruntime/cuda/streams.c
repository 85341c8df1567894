/* Streams, events, captures, and functions of the host that wait in a stream. */
#include "runtime.h"

#undef cudaStreamGetCaptureInfo

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuStreamCreate)(stream, flags));
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    WITH_CONTEXT;
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuStreamDestroy)(stream));
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuStreamQuery)(stream));
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuStreamSynchronize)(stream));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuStreamWaitEvent)(stream, event, flags));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuLaunchHostFunc)(stream, function, argument));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuEventCreate)(event, flags));
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuEventDestroy)(event));
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuEventRecord)(event, stream));
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return FINISH(DRIVER(cuEventQuery)(event)); }

cudaError_t cudaEventSynchronize(cudaEvent_t event) { return FINISH(DRIVER(cuEventSynchronize)(event)); }

/* Nothing here takes time that means anything. */
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = 1;
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime_v2(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    return cudaEventElapsedTime(milliseconds, start, end);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuStreamIsCapturing)(stream, (CUstreamCaptureStatus *)status));
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuStreamBeginCapture)(stream, (CUstreamCaptureMode)mode));
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuStreamEndCapture)(stream, graph));
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    WITH_CONTEXT;
    return FINISH(DRIVER(cuThreadExchangeStreamCaptureMode)((CUstreamCaptureMode *)mode));
}

/* The driver's newer form says more of the edges, which nobody here asks for. */
typedef CUresult (*CaptureInfo)(CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, const CUgraphNode **,
                                size_t *);

cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                        size_t *count) {
    WITH_CONTEXT;
    CaptureInfo capture_info = (CaptureInfo)driver_function("cuStreamGetCaptureInfo_v2");
    cuuint64_t number = 0;
    CUresult result = capture_info(stream, (CUstreamCaptureStatus *)status, &number, graph, nodes, count);
    if (id) {
        *id = number;
    }
    return FINISH(result);
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    if (edges) {
        *edges = NULL;
    }
    return cudaStreamGetCaptureInfo_v2(stream, status, id, graph, nodes, count);
}
#endif
