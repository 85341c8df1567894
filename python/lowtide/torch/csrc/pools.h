// Memory pools: their callbacks, captures, and checkpoints.
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

// Returns whether a filter accepts a stream; false if the filter throws.
inline bool accepts(const StreamFilter& filter, void* stream) noexcept {
  try {
    return filter(static_cast<cudaStream_t>(stream));
  } catch (...) {
    C10_CUDA_CLEAR_ERROR();
    return false;
  }
}

// Serves the requests of the streams that the filter accepts from a pool.
inline void route(DeviceIndex device, const MempoolId_t& pool, StreamFilter filter) {
  const auto accept = [](void* context, void* stream) {
    return accepts(*static_cast<const StreamFilter*>(context), stream);
  };
  // lowtide deletes the context on failure, too.
  auto* context = new StreamFilter(std::move(filter));
  check(lowtide_begin_allocate_to_pool(device, to_lowtide(pool), accept, context, &delete_context<StreamFilter>));
}

using Source = std::shared_ptr<native::CUDAAllocator>;

// Makes a pool allocate its segments with the user's allocator.
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

// Warns of a failure at the end of a capture. The program can go on: the next request retries what is left.
inline void warn_unless_ok(lowtide_status status) {
  if (status != LOWTIDE_STATUS_OK) {
    TORCH_WARN(lowtide_last_error());
  }
}

// Notes that a graph capture has begun.
inline void begin_capture(DeviceIndex device) {
  check(lowtide_capture_begin(device));
  count_capture_begin();
}

// Notes that a graph capture has ended.
inline void end_capture(DeviceIndex device) {
  count_capture_end();
  warn_unless_ok(lowtide_capture_end(device));
}

#if !LOWTIDE_TORCH_AT_LEAST(13)
// Returns whether work in a stream is captured into a graph; true if the query fails, as for the default stream during
// another stream's capture.
inline bool is_captured(cudaStream_t stream) noexcept {
  auto status = cudaStreamCaptureStatusActive;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    C10_CUDA_CLEAR_ERROR();
  }
  return status != cudaStreamCaptureStatusNone;
}

// The pools that requests are routed to, and the captures among them. Since 2.13, PyTorch reports captures itself.
class Routes {
 public:
  // Routes requests to a pool. A capture begins in the stream that is current now.
  void begin(DeviceIndex device, const MempoolId_t& pool, StreamFilter filter, cudaStream_t stream) {
    // A capture announces itself only here, before it begins, when its filter accepts no stream yet. Other filters
    // accept the current stream already.
    const bool is_capture = !accepts(filter, stream);
    auto has_begun = std::make_shared<std::atomic<bool>>(false);
    route(device, pool, [has_begun, filter = std::move(filter)](cudaStream_t asked) {
      const bool is_accepted = filter(asked);
      if (is_accepted) {
        has_begun->store(true, std::memory_order_relaxed);
      }
      return is_accepted;
    });
    const std::lock_guard<std::mutex> lock(mutex_);
    // A new route replaces the lost ones of this thread: their end will not come.
    const auto is_past = [&](const Route& known) { return known.is_lost && known.is_of(device, pool) && known.is_ours(); };
    routes_.erase(std::remove_if(routes_.begin(), routes_.end(), is_past), routes_.end());
    if (is_capture) {
      begin_capture(device);
    }
    routes_.push_back({device, pool, is_capture, stream, std::this_thread::get_id(), std::move(has_begun)});
  }

  // Ends the route to a pool, and returns whether there was one, lost or not. This thread's route comes first: another
  // thread may have begun one since this thread's was lost.
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

  // Ends the captures that failed without a report from PyTorch, and returns whether there were any. Otherwise lowtide
  // would query no event any more. If PyTorch reports the end later, that does nothing.
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
    // The stream and the thread that begin the capture, shortly after it was announced.
    cudaStream_t stream;
    std::thread::id thread;
    // Whether the filter has accepted a stream.
    std::shared_ptr<std::atomic<bool>> has_begun;
    // Whether the capture failed and `end_lost` has ended it.
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

// A checkpoint: the blocks of a pool at one time.
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

  // Frees the pool's blocks, allocates those of the checkpoint again, and returns both lists with sizes.
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
