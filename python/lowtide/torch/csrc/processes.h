// The memory that each process uses on a device, from NVML, NVIDIA's management library.
#pragma once

#include "status.h"

#include <dlfcn.h>
#include <unistd.h>

#include <string>
#include <vector>

namespace lowtide {

// NVML's interface, as in nvml.h. None of PyTorch's packages has that header.
class ManagementLibrary {
 public:
  struct Process {
    unsigned int number;
    unsigned long long bytes;
  };

  // Returns the library. Loads it once per process, as PyTorch does.
  static const ManagementLibrary& instance() {
    static const ManagementLibrary library;
    return library;
  }

  // Returns the processes that compute on a device; an empty list if NVML does not report them.
  std::vector<Process> processes(DeviceIndex device) const {
    char address[32];
    void* found = nullptr;
    if (!is_started_ || cudaDeviceGetPCIBusId(address, sizeof(address), device) != cudaSuccess ||
        find_(address, &found) != kSuccess) {
      return {};
    }
    std::vector<Process> list(8);
    for (;;) {
      auto count = static_cast<unsigned int>(list.size());
      const int status = list_(found, &count, list.data());
      if (status != kTooSmall) {
        list.resize(status == kSuccess ? count : 0);
        return list;
      }
      // More processes may start meanwhile.
      list.resize(count + 8);
    }
  }

 private:
  static constexpr int kSuccess = 0;
  static constexpr int kTooSmall = 7;

  ManagementLibrary() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_LAZY);
    if (library == nullptr) {
      return;
    }
    const auto start = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
    find_ = reinterpret_cast<decltype(find_)>(dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2"));
    list_ = reinterpret_cast<decltype(list_)>(dlsym(library, "nvmlDeviceGetComputeRunningProcesses"));
    is_started_ = start != nullptr && find_ != nullptr && list_ != nullptr && start() == kSuccess;
  }

  bool is_started_ = false;
  int (*find_)(const char* address, void** device) = nullptr;
  int (*list_)(void* device, unsigned int* count, Process* processes) = nullptr;
};

// Returns each process's memory on a device, as PyTorch's error message says it, with a space at the end. The text is
// empty if NVML does not report it.
inline std::string memory_by_process(DeviceIndex device) {
  // NVML's value if the driver does not report a process's memory.
  constexpr unsigned long long unknown = -1;
  std::string text;
  for (const auto& process : ManagementLibrary::instance().processes(device)) {
    if (process.bytes == unknown) {
      continue;
    }
    const bool is_this = process.number == static_cast<unsigned int>(getpid());
    text += is_this ? "Including non-PyTorch memory, this process" : "Process " + std::to_string(process.number);
    text += " has " + in_words(process.bytes) + " memory in use. ";
  }
  return text;
}

}  // namespace lowtide
