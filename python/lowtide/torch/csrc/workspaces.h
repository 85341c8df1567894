// The memory that PyTorch keeps for cuBLAS: a block for each handle and stream, for good.
#pragma once

#include "status.h"

#include <c10/core/Allocator.h>

#include <atomic>
#include <iterator>
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

// Whether any graph was captured in this process, which may use a workspace for as long as it lives.
inline std::atomic<bool> has_captured{false};

// Returns whether a workspace lies in a region with this tag, or in any if it is null.
inline bool is_in_region(const at::cuda::Workspace& workspace, const char* tag) {
#if LOWTIDE_TORCH_AT_LEAST(13)
  const auto* memory = workspace.first.get();
#else
  const auto* memory = workspace.get();
#endif
  bool is_in = false;
  return lowtide_is_in_region(memory, tag, &is_in) == LOWTIDE_STATUS_OK && is_in;
}

// Calls a function with each of PyTorch's lists.
template <typename Act>
void with_workspaces(Act act) {
#if LOWTIDE_TORCH_AT_LEAST(10)
  for (auto* workspaces :
       {&at::cuda::cublas_handle_stream_to_workspace(), &at::cuda::cublaslt_handle_stream_to_workspace()}) {
    const std::unique_lock<std::shared_mutex> lock(workspaces->mutex);
    act(workspaces->map);
  }
#else
  // PyTorch has no lock for them, be it to clear them: another thread must not multiply matrices meanwhile.
  act(at::cuda::cublas_handle_stream_to_workspace());
#if LOWTIDE_TORCH_AT_LEAST(9)
  act(at::cuda::cublaslt_handle_stream_to_workspace());
#endif
#endif
}

// Workspaces that PyTorch does not see while their regions are away.
class WorkspacesAside {
 public:
  static WorkspacesAside& instance() {
    // Never dropped: what it holds would be given back when PyTorch is gone.
    static auto* aside = new WorkspacesAside;
    return *aside;
  }

  // Takes those that lie in regions with this tag, or in any region if it is null: work outside of the regions would go
  // on to use them. They go back where no graph may use them. The others stay with PyTorch.
  void take(const char* tag) {
    // What is dropped goes back when the locks are released.
    std::vector<Aside> taken;
    with_workspaces([&](at::cuda::Workspaces& workspaces) {
      for (auto entry = workspaces.begin(); entry != workspaces.end();) {
        if (is_in_region(entry->second, tag)) {
          taken.push_back({&workspaces, entry->first, std::move(entry->second)});
          entry = workspaces.erase(entry);
        } else {
          ++entry;
        }
      }
    });
    if (has_captured.load(std::memory_order_relaxed)) {
      const std::lock_guard<std::mutex> lock(mutex_);
      aside_.insert(aside_.end(), std::make_move_iterator(taken.begin()), std::make_move_iterator(taken.end()));
      taken.clear();
    }
  }

  // Puts those that lie in regions with this tag, or in any region if it is null, back where PyTorch has no others by
  // now. Where it has, a graph may use them still.
  void put_back(const char* tag) {
    const std::lock_guard<std::mutex> lock(mutex_);
    with_workspaces([&](at::cuda::Workspaces& workspaces) {
      for (auto aside = aside_.begin(); aside != aside_.end();) {
        const bool is_back = aside->workspaces == &workspaces && is_in_region(aside->workspace, tag) &&
            workspaces.try_emplace(aside->key, std::move(aside->workspace)).second;
        aside = is_back ? aside_.erase(aside) : std::next(aside);
      }
    });
  }

 private:
  struct Aside {
    at::cuda::Workspaces* workspaces;
    at::cuda::Workspaces::key_type key;
    at::cuda::Workspace workspace;
  };

  std::mutex mutex_;
  std::vector<Aside> aside_;
};

}  // namespace lowtide
