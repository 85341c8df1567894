// The memory that PyTorch keeps for cuBLAS: a block for each handle and stream, for good.
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

// How many captures are under way in this process, and how often one has begun or ended. A graph may use what was a workspace
// in between, for as long as it lives.
inline std::atomic<uint64_t> captures_under_way{0};
inline std::atomic<uint64_t> capture_changes{0};

inline void count_capture_begin() noexcept {
  captures_under_way.fetch_add(1, std::memory_order_relaxed);
  capture_changes.fetch_add(1, std::memory_order_relaxed);
}

inline void count_capture_end() noexcept {
  capture_changes.fetch_add(1, std::memory_order_relaxed);
  // PyTorch may tell of the end of one that has not begun.
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

// Returns whether a workspace lies in a region that is not on the device; what is not lowtide's does not.
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

// Workspaces that PyTorch does not see while their regions are away. Those come back that a graph may use; others are let go
// of.
class WorkspacesAside {
 public:
  // Is there from before a pause of the regions with a tag, or of all if it is null, until that has ended or failed. Work
  // outside of them would go on to use the workspaces that lie in them, so none of these is PyTorch's meanwhile.
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
    // Never dropped: what it holds would be given back when PyTorch is gone.
    static auto* aside = new WorkspacesAside;
    return *aside;
  }

  // Takes those that are away by now, and puts the others back. Comes after every change of a region, so that the last of
  // several at once leaves it right.
  void settle() noexcept {
    exchange(is_away);
  }

 private:
  using Workspaces = at::cuda::Workspaces;

  // Memory that graphs may use.
  using Used = std::set<const void*>;

  struct Aside {
    Workspaces* workspaces;
    Workspaces::key_type key;
    at::cuda::Workspace workspace;
    // Whether it was taken from PyTorch, and did not make room for one that was.
    bool is_taken;
  };

  // What was seen of one of PyTorch's lists.
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
    settle();
  }

  // Takes those that are chosen, and puts back what stays. What is not done for want of the host's memory, the next does.
  template <typename IsChosen>
  void exchange(IsChosen is_chosen) noexcept {
    // What is let go of goes back when the locks are released.
    std::vector<Aside> dropped;
    try {
      const std::lock_guard<std::mutex> lock(mutex_);
      with_workspaces([&](Workspaces& workspaces) {
        auto& used = note_used(workspaces);
        aside_.reserve(aside_.size() + workspaces.size());
        dropped.reserve(dropped.size() + aside_.capacity());
        take(workspaces, used, is_chosen, dropped);
        put_back(workspaces, used, dropped);
      });
    } catch (const std::exception&) {
    }
  }

  // Returns which of the workspaces graphs may use: all, where a capture is under way or has begun or ended since they were
  // seen last, and otherwise those of then that are there still. A capture counts before it looks for a workspace.
  Used& note_used(const Workspaces& workspaces) {
    auto& seen = seen_[&workspaces];
    // In this order, as one that is under way no more has counted its end before that.
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
  void take(Workspaces& workspaces, const Used& used, IsChosen is_chosen, std::vector<Aside>& dropped) {
    for (auto entry = workspaces.begin(); entry != workspaces.end();) {
      if (is_chosen(entry->second)) {
        auto& taken = used.count(memory_of(entry->second)) > 0 ? aside_ : dropped;
        taken.push_back({&workspaces, entry->first, std::move(entry->second), true});
        entry = workspaces.erase(entry);
      } else {
        ++entry;
      }
    }
  }

  void put_back(Workspaces& workspaces, Used& used, std::vector<Aside>& dropped) {
    for (auto aside = aside_.begin(); aside != aside_.end();) {
      if (aside->workspaces == &workspaces && stays(aside->workspace) && !remains(*aside, used, dropped)) {
        aside = aside_.erase(aside);
      } else {
        ++aside;
      }
    }
  }

  // Puts a workspace back, and returns whether one is aside all the same: itself, where it made room for the one that is
  // there, or else that, if a graph may use it. Were one that comes back refused in favor of what PyTorch has made
  // meanwhile, PyTorch would drop and make others, and it would stay.
  static bool remains(Aside& aside, Used& used, std::vector<Aside>& dropped) {
    used.insert(memory_of(aside.workspace));
    const auto [listed, is_only] = aside.workspaces->try_emplace(aside.key, std::move(aside.workspace));
    if (is_only || !aside.is_taken) {
      return !is_only;
    }
    std::swap(listed->second, aside.workspace);
    aside.is_taken = false;
    const bool is_used = used.count(memory_of(aside.workspace)) > 0;
    if (!is_used) {
      dropped.push_back(std::move(aside));
    }
    return is_used;
  }

  // Returns whether a workspace is on the device, and no pause is about to take it away.
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
  // Those that are under way.
  Pause* pauses_ = nullptr;
};

// What the last pause or resume of this thread that failed said. To settle may overwrite `lowtide_last_error`, as it asks for
// workspaces that are not lowtide's.
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

// As `lowtide_pause`, or `lowtide_pause_and_drop` if nothing is to be kept. In one, as an interrupt of Python in between
// would leave workspaces aside.
inline lowtide_status pause_regions(const char* tag, bool keep) noexcept {
  const WorkspacesAside::Pause aside(tag);
  return keep_error(keep ? lowtide_pause(tag) : lowtide_pause_and_drop(tag));
}

// As `lowtide_resume`.
inline lowtide_status resume_regions(const char* tag) noexcept {
  const auto status = keep_error(lowtide_resume(tag));
  WorkspacesAside::instance().settle();
  return status;
}

}  // namespace lowtide
