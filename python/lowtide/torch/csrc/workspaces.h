// The memory that PyTorch keeps for cuBLAS: a block for each handle and stream, for good.
#pragma once

#include "status.h"

#include <c10/core/Allocator.h>

#include <map>
#include <mutex>
#include <shared_mutex>
#include <tuple>
#include <utility>
#include <vector>

// As PyTorch's ATen/cuda/CUDAContextLight.h says, which takes headers of CUDA that the shim needs for nothing else.
namespace at::cuda {
#if LOWTIDE_TORCH_AT_LEAST(13)
using Workspace = std::pair<at::DataPtr, size_t>;
#else
using Workspace = at::DataPtr;
#endif
using Workspaces = std::map<std::tuple<void*, void*>, Workspace>;
#if LOWTIDE_TORCH_AT_LEAST(10)
struct WorkspaceMapWithMutex {
  Workspaces map;
  std::shared_mutex mutex;
};
__attribute__((visibility("default"))) WorkspaceMapWithMutex& cublas_handle_stream_to_workspace();
__attribute__((visibility("default"))) WorkspaceMapWithMutex& cublaslt_handle_stream_to_workspace();
#else
__attribute__((visibility("default"))) Workspaces& cublas_handle_stream_to_workspace();
#if LOWTIDE_TORCH_AT_LEAST(9)
__attribute__((visibility("default"))) Workspaces& cublaslt_handle_stream_to_workspace();
#endif
#endif
}  // namespace at::cuda

namespace lowtide {

// Moves the workspaces that lie in regions with this tag, or in any region if it is null, out of PyTorch's list.
inline void take_workspaces(at::cuda::Workspaces& workspaces, const char* tag, std::vector<at::cuda::Workspace>& taken) {
  const auto memory = [](const at::cuda::Workspace& workspace) {
#if LOWTIDE_TORCH_AT_LEAST(13)
    return workspace.first.get();
#else
    return workspace.get();
#endif
  };
  for (auto entry = workspaces.begin(); entry != workspaces.end();) {
    bool is_in = false;
    const auto status = lowtide_is_in_region(memory(entry->second), tag, &is_in);
    if (status == LOWTIDE_STATUS_OK && is_in) {
      taken.push_back(std::move(entry->second));
      entry = workspaces.erase(entry);
    } else {
      ++entry;
    }
  }
}

// Gives those workspaces back: work outside of the regions would go on to use them while they are away. The others
// stay, as captured graphs may use them.
inline void release_workspaces(const char* tag) {
  // They go back when the locks are released.
  std::vector<at::cuda::Workspace> taken;
#if LOWTIDE_TORCH_AT_LEAST(10)
  for (auto* workspaces :
       {&at::cuda::cublas_handle_stream_to_workspace(), &at::cuda::cublaslt_handle_stream_to_workspace()}) {
    const std::unique_lock<std::shared_mutex> lock(workspaces->mutex);
    take_workspaces(workspaces->map, tag, taken);
  }
#else
  // PyTorch has no lock for them, be it to clear them: another thread must not multiply matrices meanwhile.
  take_workspaces(at::cuda::cublas_handle_stream_to_workspace(), tag, taken);
#if LOWTIDE_TORCH_AT_LEAST(9)
  take_workspaces(at::cuda::cublaslt_handle_stream_to_workspace(), tag, taken);
#endif
#endif
}

}  // namespace lowtide
