// Memory pools: what lowtide calls back for them, and pools put back as they were.
#pragma once

#include "status.h"

#include <c10/cuda/CUDAGuard.h>

#include <functional>
#include <memory>
#include <mutex>
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

#if !LOWTIDE_TORCH_AT_LEAST(13)
// Which of the pools that requests are routed to belong to a capture under way. PyTorch says so itself from 2.13 on.
class Captures {
 public:
  void begin(DeviceIndex device, const MempoolId_t& pool, bool is_capture) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_capture) {
      check(lowtide_capture_begin(device));
    }
    routes_.push_back({device, pool, is_capture});
  }

  void end(DeviceIndex device, const MempoolId_t& pool) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto route = routes_.rbegin(); route != routes_.rend(); ++route) {
      if (route->device == device && route->pool == pool) {
        const bool is_capture = route->is_capture;
        routes_.erase(std::next(route).base());
        if (is_capture) {
          check(lowtide_capture_end(device));
        }
        return;
      }
    }
  }

 private:
  struct Route {
    DeviceIndex device;
    MempoolId_t pool;
    bool is_capture;
  };
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
