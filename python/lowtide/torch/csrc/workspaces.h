// PyTorch's cuBLAS workspaces: one block for each handle and stream, which PyTorch keeps until they are cleared.
#pragma once

#include "status.h"

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

// Declarations as in PyTorch's ATen/cuda/CUDAContextLight.h, which includes CUDA headers that the shim does not need.
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

// The number of captures under way in this process, and the number of their begins and ends. A graph may use any
// workspace of the time of its capture, as long as the graph lives.
inline std::atomic<uint64_t> captures_under_way{0};
inline std::atomic<uint64_t> capture_changes{0};

inline void count_capture_begin() noexcept {
  captures_under_way.fetch_add(1, std::memory_order_relaxed);
  capture_changes.fetch_add(1, std::memory_order_relaxed);
}

inline void count_capture_end() noexcept {
  capture_changes.fetch_add(1, std::memory_order_relaxed);
  // PyTorch may report the end of a capture that has not begun.
  auto before = captures_under_way.load(std::memory_order_relaxed);
  while (before > 0 && !captures_under_way.compare_exchange_weak(before, before - 1, std::memory_order_release)) {
  }
}

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

// Returns whether a workspace lies in a paused region; false for memory that is not lowtide's.
inline bool is_away(const at::cuda::Workspace& workspace) {
  bool is_away = false;
  return lowtide_is_away(memory_of(workspace), &is_away) == LOWTIDE_STATUS_OK && is_away;
}

// Calls a function with each of PyTorch's workspace maps.
template <typename Act>
void with_workspaces(Act act) {
#if LOWTIDE_TORCH_AT_LEAST(10)
  for (auto* workspaces :
       {&at::cuda::cublas_handle_stream_to_workspace(), &at::cuda::cublaslt_handle_stream_to_workspace()}) {
    const std::unique_lock<std::shared_mutex> lock(workspaces->mutex);
    act(workspaces->map);
  }
#else
  // PyTorch has no lock for them, not even to clear them. Other threads must not multiply matrices meanwhile.
  act(at::cuda::cublas_handle_stream_to_workspace());
#if LOWTIDE_TORCH_AT_LEAST(9)
  act(at::cuda::cublaslt_handle_stream_to_workspace());
#endif
#endif
}

// The workspaces that are detached from PyTorch while their regions are paused. Those that a graph may use are
// reattached after the resume; the others are freed.
class WorkspacesAside {
 public:
  // A guard for a pause of the regions with a tag, or of all regions if it is null. Create it before the pause and
  // destroy it once the pause has ended or failed. Meanwhile the regions' workspaces are detached, because work outside
  // of the regions would use them.
  class Pause {
   public:
    explicit Pause(const char* tag) noexcept : tag_(tag) {
      instance().begin(this);
    }

    ~Pause() {
      instance().end(this);
    }

    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    friend WorkspacesAside;

    const char* tag_;
    Pause* next_ = nullptr;
  };

  static WorkspacesAside& instance() {
    // Never destroyed: it would free workspaces after PyTorch's own destruction.
    static auto* aside = new WorkspacesAside;
    return *aside;
  }

  // Detaches the workspaces of paused regions and reattaches the others. Call it after every pause and resume: if
  // several run at once, the last call leaves the right state.
  void sync_with_regions() noexcept {
    exchange(is_away);
  }

 private:
  using Workspaces = at::cuda::Workspaces;

  // The addresses of workspaces that graphs may use.
  using Used = std::set<const void*>;

  struct Aside {
    Workspaces* workspaces;
    Workspaces::key_type key;
    at::cuda::Workspace workspace;
    // Whether it was detached for a pause. Otherwise a reattached workspace replaced it.
    bool is_detached;
  };

  // The state of one of PyTorch's maps when it was last read.
  struct Seen {
    uint64_t capture_changes = 0;
    Used used;
  };

  void begin(Pause* pause) noexcept {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      pause->next_ = pauses_;
      pauses_ = pause;
    }
    exchange([pause](const at::cuda::Workspace& workspace) { return is_in_region(workspace, pause->tag_); });
  }

  void end(Pause* pause) noexcept {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto** place = &pauses_;
      while (*place != pause) {
        place = &(*place)->next_;
      }
      *place = pause->next_;
    }
    sync_with_regions();
  }

  // Detaches the chosen workspaces and reattaches those that stay. If host memory runs out, the next call goes on.
  template <typename IsChosen>
  void exchange(IsChosen is_chosen) noexcept {
    // These workspaces are freed after the locks are released.
    std::vector<Aside> dropped;
    try {
      const std::lock_guard<std::mutex> lock(mutex_);
      with_workspaces([&](Workspaces& workspaces) {
        auto& used = note_used(workspaces);
        aside_.reserve(aside_.size() + workspaces.size());
        dropped.reserve(dropped.size() + aside_.capacity());
        detach(workspaces, used, is_chosen, dropped);
        reattach(workspaces, used, dropped);
      });
    } catch (const std::exception&) {
    }
  }

  // Returns the workspaces that graphs may use. If a capture is under way, or has begun or ended since the last call,
  // these are all workspaces. Otherwise they are those of the last call that still exist. A capture is counted before
  // it looks for a workspace.
  Used& note_used(const Workspaces& workspaces) {
    auto& seen = seen_[&workspaces];
    // Read the number of captures first: a capture that is no longer under way has counted its end already.
    const bool is_any_under_way = captures_under_way.load(std::memory_order_acquire) > 0;
    const auto changes = capture_changes.load(std::memory_order_relaxed);
    const bool are_all = is_any_under_way || changes != seen.capture_changes;
    Used used;
    for (const auto& [key, workspace] : workspaces) {
      if (are_all || seen.used.count(memory_of(workspace)) > 0) {
        used.insert(memory_of(workspace));
      }
    }
    seen = {changes, std::move(used)};
    return seen.used;
  }

  template <typename IsChosen>
  void detach(Workspaces& workspaces, const Used& used, IsChosen is_chosen, std::vector<Aside>& dropped) {
    for (auto entry = workspaces.begin(); entry != workspaces.end();) {
      if (is_chosen(entry->second)) {
        auto& detached = used.count(memory_of(entry->second)) > 0 ? aside_ : dropped;
        detached.push_back({&workspaces, entry->first, std::move(entry->second), true});
        entry = workspaces.erase(entry);
      } else {
        ++entry;
      }
    }
  }

  void reattach(Workspaces& workspaces, Used& used, std::vector<Aside>& dropped) {
    for (auto aside = aside_.begin(); aside != aside_.end();) {
      if (aside->workspaces == &workspaces && stays(aside->workspace) && !remains(*aside, used, dropped)) {
        aside = aside_.erase(aside);
      } else {
        ++aside;
      }
    }
  }

  // Reattaches a workspace, and returns whether `aside` still holds one. If PyTorch has made another one meanwhile, the
  // reattached one replaces it, and `aside` holds PyTorch's if a graph may use it. If PyTorch's stayed instead, `aside`
  // would never become empty. A workspace that was replaced itself stays aside while PyTorch has another.
  static bool remains(Aside& aside, Used& used, std::vector<Aside>& dropped) {
    used.insert(memory_of(aside.workspace));
    const auto [listed, is_only] = aside.workspaces->try_emplace(aside.key, std::move(aside.workspace));
    if (is_only || !aside.is_detached) {
      return !is_only;
    }
    std::swap(listed->second, aside.workspace);
    aside.is_detached = false;
    const bool is_used = used.count(memory_of(aside.workspace)) > 0;
    if (!is_used) {
      dropped.push_back(std::move(aside));
    }
    return is_used;
  }

  // Returns whether a workspace is on the device and no pause under way covers it.
  bool stays(const at::cuda::Workspace& workspace) const {
    for (const auto* pause = pauses_; pause != nullptr; pause = pause->next_) {
      if (is_in_region(workspace, pause->tag_)) {
        return false;
      }
    }
    return !is_away(workspace);
  }

  std::mutex mutex_;
  std::vector<Aside> aside_;
  std::map<const Workspaces*, Seen> seen_;
  // The pauses under way.
  Pause* pauses_ = nullptr;
};

// The error message of this thread's last pause or resume that failed. `sync_with_regions` may overwrite
// `lowtide_last_error`, because it looks up workspaces that are not lowtide's.
inline thread_local std::string change_error;

inline lowtide_status keep_error(lowtide_status status) noexcept {
  if (status != LOWTIDE_STATUS_OK) {
    try {
      change_error = lowtide_last_error();
    } catch (const std::exception&) {
      change_error.clear();
    }
  }
  return status;
}

// Calls `lowtide_pause`, or `lowtide_pause_and_drop` if `keep` is false. This is one function, because a Python
// interrupt between its steps would leave workspaces detached.
inline lowtide_status pause_regions(const char* tag, bool keep) noexcept {
  const WorkspacesAside::Pause aside(tag);
  return keep_error(keep ? lowtide_pause(tag) : lowtide_pause_and_drop(tag));
}

// Calls `lowtide_resume`, then reattaches the workspaces.
inline lowtide_status resume_regions(const char* tag) noexcept {
  const auto status = keep_error(lowtide_resume(tag));
  WorkspacesAside::instance().sync_with_regions();
  return status;
}

}  // namespace lowtide
