// The memory that PyTorch keeps for cuBLAS: a block for each handle and stream, for good.
#pragma once

#include "status.h"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
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

inline const void* memory_of(const at::cuda::Workspace& workspace) {
#if LOWTIDE_TORCH_AT_LEAST(13)
  return workspace.first.get();
#else
  return workspace.get();
#endif
}

// Returns whether a workspace lies in a region with this tag, or in any if it is null.
inline bool is_in_region(const at::cuda::Workspace& workspace, const char* tag) {
  bool is_in = false;
  return lowtide_is_in_region(memory_of(workspace), tag, &is_in) == LOWTIDE_STATUS_OK && is_in;
}

// Returns whether a workspace lies in a region that is not on the device.
inline bool is_away(const at::cuda::Workspace& workspace) {
  bool is_away = false;
  return lowtide_is_away(memory_of(workspace), &is_away) == LOWTIDE_STATUS_OK && is_away;
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

  // Takes those that lie in regions with this tag, or in any region if it is null, as these are about to leave: work
  // outside of them would go on to use the workspaces. None of these comes back before `end_pause`.
  void begin_pause(const char* tag) {
    begin(tag);
    take_if([tag](const at::cuda::Workspace& workspace) { return is_in_region(workspace, tag); });
  }

  // Comes after every pause, also one that failed or did not begin.
  void end_pause(const char* tag) {
    end(tag);
    settle();
  }

  // Takes those that are away by now, and puts the others back. Comes after every change of a region, so that the last of
  // several at once leaves it right.
  void settle() {
    take_if(is_away);
    const std::lock_guard<std::mutex> lock(mutex_);
    with_workspaces([&](at::cuda::Workspaces& workspaces) {
      for (auto aside = aside_.begin(); aside != aside_.end();) {
        const bool is_back = aside->workspaces == &workspaces && stays(aside->workspace) && put_back(*aside);
        aside = is_back ? aside_.erase(aside) : std::next(aside);
      }
    });
  }

 private:
  struct Aside {
    at::cuda::Workspaces* workspaces;
    at::cuda::Workspaces::key_type key;
    at::cuda::Workspace workspace;
    // Whether it was taken from PyTorch, and did not make room for one that was.
    bool is_taken;
  };

  // The tag of a pause, or that of every region.
  using Tag = std::optional<std::string>;

  static Tag tag_of(const char* tag) {
    return tag == nullptr ? Tag() : Tag(tag);
  }

  void begin(const char* tag) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pausing_.push_back(tag_of(tag));
  }

  void end(const char* tag) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto ended = std::find(pausing_.begin(), pausing_.end(), tag_of(tag));
    if (ended != pausing_.end()) {
      pausing_.erase(ended);
    }
  }

  // Takes those that are chosen, which go back where no graph may use them.
  template <typename IsChosen>
  void take_if(IsChosen is_chosen) {
    // It goes back when the locks are released.
    std::vector<Aside> dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    with_workspaces([&](at::cuda::Workspaces& workspaces) {
      // Who captures says so before it looks for a workspace here.
      auto& taken = has_captured.load(std::memory_order_relaxed) ? aside_ : dropped;
      // Nothing fails once the first is taken.
      taken.reserve(taken.size() + workspaces.size());
      for (auto entry = workspaces.begin(); entry != workspaces.end();) {
        if (is_chosen(entry->second)) {
          taken.push_back({&workspaces, entry->first, std::move(entry->second), true});
          entry = workspaces.erase(entry);
        } else {
          ++entry;
        }
      }
    });
  }

  // Returns whether a workspace is on the device, and nobody is about to take it away.
  bool stays(const at::cuda::Workspace& workspace) const {
    const auto leaves = [&](const Tag& tag) { return is_in_region(workspace, tag ? tag->c_str() : nullptr); };
    return !is_away(workspace) && std::none_of(pausing_.begin(), pausing_.end(), leaves);
  }

  // Returns whether nothing is aside any more. Otherwise what PyTorch has made meanwhile is, as a graph may use it. Were what
  // comes back refused in its favor, there would be one more with each that PyTorch drops and makes.
  static bool put_back(Aside& aside) {
    const auto [listed, is_first] = aside.workspaces->try_emplace(aside.key, std::move(aside.workspace));
    if (!is_first && aside.is_taken) {
      std::swap(listed->second, aside.workspace);
      aside.is_taken = false;
    }
    return is_first;
  }

  std::mutex mutex_;
  std::vector<Aside> aside_;
  // Each as often as there are pauses of it under way.
  std::vector<Tag> pausing_;
};

}  // namespace lowtide
