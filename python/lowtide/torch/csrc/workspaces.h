// The memory that PyTorch keeps for cuBLAS: a block for each handle and stream, for good.
#pragma once

#include "status.h"

#if LOWTIDE_TORCH_AT_LEAST(11)

#include <c10/core/Allocator.h>

#include <map>
#include <mutex>
#include <shared_mutex>
#include <tuple>
#include <vector>

// As PyTorch's ATen/cuda/CUDAContextLight.h says, which takes headers of CUDA that the shim needs for nothing else.
namespace at::cuda {
struct WorkspaceMapWithMutex {
  std::map<std::tuple<void*, void*>, at::DataPtr> map;
  std::shared_mutex mutex;
};
__attribute__((visibility("default"))) WorkspaceMapWithMutex& cublas_handle_stream_to_workspace();
__attribute__((visibility("default"))) WorkspaceMapWithMutex& cublaslt_handle_stream_to_workspace();
}  // namespace at::cuda

namespace lowtide {

// Gives back the workspaces that lie in regions with this tag, or in any region if it is null: work outside of these
// would go on to use them while they are away. The others stay, as captured graphs may use them.
inline void release_workspaces(const char* tag) {
  // They go back when the locks are released.
  std::vector<at::DataPtr> released;
  for (auto* workspaces :
       {&at::cuda::cublas_handle_stream_to_workspace(), &at::cuda::cublaslt_handle_stream_to_workspace()}) {
    const std::unique_lock<std::shared_mutex> lock(workspaces->mutex);
    for (auto entry = workspaces->map.begin(); entry != workspaces->map.end();) {
      bool is_in = false;
      const auto status = lowtide_is_in_region(entry->second.get(), tag, &is_in);
      if (status == LOWTIDE_STATUS_OK && is_in) {
        released.push_back(std::move(entry->second));
        entry = workspaces->map.erase(entry);
      } else {
        ++entry;
      }
    }
  }
}

}  // namespace lowtide

#else

namespace lowtide {

// Older versions show nobody what they keep.
inline void release_workspaces(const char*) {}

}  // namespace lowtide

#endif
