// Memory pools: what lowtide calls back for them, and pools put back as they were.
#pragma once

#include "status.h"
#include "workspaces.h"

#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace lowtide {

using StreamFilter = std::function<bool(cudaStream_t)>;

template <typename T>
void delete_context(void* context) {
  delete static_cast<T*>(context);
}

// Whether a filter, which may throw, takes a stream.
inline bool accepts(const StreamFilter& filter, void* stream) noexcept {
  try {
    return filter(static_cast<cudaStream_t>(stream));
  } catch (...) {
    C10_CUDA_CLEAR_ERROR();
    return false;
  }
}

// Serves the streams that the filter takes from a pool.
inline void route(DeviceIndex device, const MempoolId_t& pool, StreamFilter filter) {
  const auto accept = [](void* context, void* stream) {
    return accepts(*static_cast<const StreamFilter*>(context), stream);
  };
  // lowtide ends the context on failure too.
  auto* context = new StreamFilter(std::move(filter));
  check(lowtide_begin_allocate_to_pool(device, to_lowtide(pool), accept, context, &delete_context<StreamFilter>));
}

using Source = std::shared_ptr<native::CUDAAllocator>;

// Has the segments of a pool come from an allocator of the user's.
inline void set_source(DeviceIndex device, const MempoolId_t& pool, Source source) {
  const auto allocate = [](void* context, size_t size, int device, void* stream) -> void* {
    try {
      const c10::cuda::CUDAGuard guard(static_cast<DeviceIndex>(device));
      return (*static_cast<Source*>(context))->raw_alloc_with_stream(size, static_cast<cudaStream_t>(stream));
    } catch (...) {
      C10_CUDA_CLEAR_ERROR();
      return nullptr;
    }
  };
  const auto release = [](void* context, void* memory, size_t, int device) {
    try {
      const c10::cuda::CUDAGuard guard(static_cast<DeviceIndex>(device));
      (*static_cast<Source*>(context))->raw_delete(memory);
    } catch (const std::exception& error) {
      C10_CUDA_CLEAR_ERROR();
      TORCH_WARN("the allocator of a memory pool did not take a segment back: ", error.what());
    } catch (...) {
      TORCH_WARN("the allocator of a memory pool did not take a segment back");
    }
  };
  auto* context = new Source(std::move(source));
  check(lowtide_set_pool_source(device, to_lowtide(pool), allocate, release, context, &delete_context<Source>));
}

// What goes wrong at the end of a capture leaves memory to the next request, and is no reason not to go on.
inline void warn_unless_ok(lowtide_status status) {
  if (status != LOWTIDE_STATUS_OK) {
    TORCH_WARN(lowtide_last_error());
  }
}

// Notes that a graph is captured from now on.
inline void begin_capture(DeviceIndex device) {
  check(lowtide_capture_begin(device));
  count_capture_begin();
}

// Notes that the capture has ended.
inline void end_capture(DeviceIndex device) {
  count_capture_end();
  warn_unless_ok(lowtide_capture_end(device));
}

#if !LOWTIDE_TORCH_AT_LEAST(13)
// Whether work in a stream goes into a graph. Where nobody can tell, as for the default stream beside a capture, it may.
inline bool is_captured(cudaStream_t stream) noexcept {
  auto status = cudaStreamCaptureStatusActive;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    C10_CUDA_CLEAR_ERROR();
  }
  return status != cudaStreamCaptureStatusNone;
}

// The pools that requests are routed to, and which of them belong to a capture under way. PyTorch says so itself from
// 2.13 on.
class Routes {
 public:
  // Routes requests to a pool. A capture begins in the stream that is current now.
  void begin(DeviceIndex device, const MempoolId_t& pool, StreamFilter filter, cudaStream_t stream) {
    // A capture announces itself here and nowhere else, before it begins, when its filter takes no stream yet. Who
    // wants a thread's or a stream's requests in a pool wants those of the present one.
    const bool is_capture = !accepts(filter, stream);
    auto has_begun = std::make_shared<std::atomic<bool>>(false);
    route(device, pool, [has_begun, filter = std::move(filter)](cudaStream_t asked) {
      const bool is_taken = filter(asked);
      if (is_taken) {
        has_begun->store(true, std::memory_order_relaxed);
      }
      return is_taken;
    });
    const std::lock_guard<std::mutex> lock(mutex_);
    // Who begins anew does not end what was lost before.
    const auto is_past = [&](const Route& known) { return known.is_lost && known.is_of(device, pool) && known.is_ours(); };
    routes_.erase(std::remove_if(routes_.begin(), routes_.end(), is_past), routes_.end());
    if (is_capture) {
      begin_capture(device);
    }
    routes_.push_back({device, pool, is_capture, stream, std::this_thread::get_id(), std::move(has_begun)});
  }

  // Ends the route to a pool; returns whether there is one, or was until it was lost. That of this thread comes first:
  // since it was lost, another may have begun.
  bool end(DeviceIndex device, const MempoolId_t& pool) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto is_meant = [&](const Route& known) { return known.is_of(device, pool) && known.is_ours(); };
    auto route = std::find_if(routes_.begin(), routes_.end(), is_meant);
    if (route == routes_.end()) {
      const auto is_live = [&](const Route& known) { return known.is_of(device, pool) && !known.is_lost; };
      route = std::find_if(routes_.begin(), routes_.end(), is_live);
    }
    if (route == routes_.end()) {
      return false;
    }
    finish(*route);
    routes_.erase(route);
    return true;
  }

  // Ends the captures of which PyTorch says nothing more, because they failed: otherwise no event would be queried from
  // then on. Returns whether there were any. Should the end of one come after all, it is no news.
  bool end_lost() {
    const std::lock_guard<std::mutex> lock(mutex_);
    bool is_any = false;
    for (auto& route : routes_) {
      if (route.is_capture && !route.is_lost && is_over(route)) {
        finish(route);
        route.is_lost = is_any = true;
      }
    }
    return is_any;
  }

 private:
  struct Route {
    DeviceIndex device;
    MempoolId_t pool;
    bool is_capture;
    // In which a capture begins, a moment after it was announced, by the thread that announced it.
    cudaStream_t stream;
    std::thread::id thread;
    // Whether the capture was seen.
    std::shared_ptr<std::atomic<bool>> has_begun;
    // It failed, and was ended.
    bool is_lost = false;

    bool is_of(DeviceIndex asked, const MempoolId_t& asked_pool) const {
      return device == asked && pool == asked_pool;
    }

    bool is_ours() const {
      return thread == std::this_thread::get_id();
    }
  };

  static bool is_over(const Route& route) {
    const bool has_begun = route.has_begun->load(std::memory_order_relaxed) || route.is_ours();
    return has_begun && !is_captured(route.stream);
  }

  static void finish(const Route& route) {
    if (route.is_lost) {
      return;
    }
    if (route.is_capture) {
      end_capture(route.device);
    }
    warn_unless_ok(lowtide_end_allocate_to_pool(route.device, to_lowtide(route.pool)));
  }

  std::mutex mutex_;
  std::vector<Route> routes_;
};
#endif

// What a pool held at a moment.
class Checkpoint final : public native::AllocatorState {
 public:
  Checkpoint(DeviceIndex device, const MempoolId_t& pool) {
    check(lowtide_checkpoint_pool(device, to_lowtide(pool), &checkpoint_));
  }
  ~Checkpoint() override {
    lowtide_release_checkpoint(checkpoint_);
  }
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  // Frees what the pool holds now and hands out what it held then; says what of each, with its size.
  struct Blocks {
    std::vector<std::pair<void*, size_t>> freed;
    std::vector<std::pair<void*, size_t>> allocated;
  };
  Blocks restore(DeviceIndex device) const {
    Blocks blocks;
    const auto freed = [](void* context, void* memory, size_t size, void*) {
      static_cast<Blocks*>(context)->freed.emplace_back(memory, size);
    };
    const auto allocated = [](void* context, void* memory, size_t size, void*) {
      static_cast<Blocks*>(context)->allocated.emplace_back(memory, size);
    };
    check(lowtide_restore_pool(device, checkpoint_, freed, allocated, &blocks));
    return blocks;
  }

 private:
  lowtide_checkpoint* checkpoint_ = nullptr;
};

}  // namespace lowtide
