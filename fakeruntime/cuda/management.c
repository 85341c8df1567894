/* NVIDIA's management library of a machine whose cards have no links, and on which nothing else runs. */
enum { NVML_SUCCESS = 0, NVML_ERROR_NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) { return NVML_SUCCESS; }

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return NVML_SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    *device = (void *)1;
    return NVML_SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
    *count = 0;
    return NVML_SUCCESS;
}

int nvmlDeviceGetGpuFabricInfoV(void *device, void *information) { return NVML_ERROR_NOT_SUPPORTED; }

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return NVML_ERROR_NOT_SUPPORTED; }

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *bus) { return NVML_ERROR_NOT_SUPPORTED; }
