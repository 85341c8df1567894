// PyTorch's CUDA allocator, implemented by lowtide.
//
// A request that is served from cached memory takes no lock and allocates no host memory in C++. Exceptions: history, a
// profiler or a tracer is on.
#pragma once

#include "history.h"
#include "pools.h"
#include "shortage.h"
#include "snapshot.h"
#include "statistics.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/env.h>
#include <torch/csrc/cuda/memory_snapshot.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

namespace lowtide {

// The deleter of the blocks that `allocate` returns. `recordStream` recognizes lowtide's tensors by it.
void free_block(void* memory);

// The deleter of memory that `allocate` took directly from the driver, while caching was off.
void free_uncached_block(void* memory);

// Returns this thread's current device, as PyTorch tracks it.
inline DeviceIndex current_device() {
  DeviceIndex device = 0;
  const cudaError_t error = C10_CUDA_ERROR_HANDLED(c10::cuda::GetDevice(&device));
  // The macro makes a call even without an error, so test first.
  if (C10_UNLIKELY(error != cudaSuccess)) {
    C10_CUDA_CHECK(error);
  }
  return device;
}

// Returns the device of a request. If PyTorch has only noted the device, this creates its context.
inline DeviceIndex device_of_request() {
  if (device_count.load(std::memory_order_relaxed) == 1) {
    return 0;
  }
  c10::cuda::SetTargetDevice();
  // The same query takes 40 to 60 ns in the runtime and 7 to 12 ns in the driver (bench/record/nvidia-h200-x2).
  const int device = lowtide_current_device();
  return C10_LIKELY(device >= 0) ? static_cast<DeviceIndex>(device) : current_device();
}

// Returns this thread's current stream.
inline cudaStream_t current_stream(DeviceIndex device) {
  return c10::cuda::getCurrentCUDAStream(device).stream();
}

class LowtideAllocator final : public native::CUDAAllocator {
 public:
  // Never destroyed: tensors may be freed while the process ends.
  static LowtideAllocator& instance() {
    static auto* allocator = new LowtideAllocator();
    return *allocator;
  }

  // ---- memory ----

  c10::DataPtr allocate(size_t size) override {
    const DeviceIndex device = device_of_request();
    if (C10_UNLIKELY(is_uncached())) {
      void* memory = allocate_uncached(size);
      return {memory, memory, &free_uncached_block, cuda_device(device)};
    }
    void* memory = take(size, device, current_stream(device));
    return {memory, memory, &free_block, cuda_device(device)};
  }

  void* raw_alloc(size_t size) override {
    if (C10_UNLIKELY(is_uncached())) {
      return allocate_uncached(size);
    }
    const DeviceIndex device = device_of_request();
    return take(size, device, current_stream(device));
  }

  void* raw_alloc_with_stream(size_t size, cudaStream_t stream) override {
    return C10_UNLIKELY(is_uncached()) ? allocate_uncached(size) : take(size, device_of_request(), stream);
  }

  void raw_delete(void* memory) override {
    if (memory == nullptr) {
      return;
    }
    const auto status = free(memory);
    if (C10_UNLIKELY(status == LOWTIDE_STATUS_NOT_ALLOCATED)) {
      // The memory may have been allocated while caching was off.
      release_uncached(memory);
      return;
    }
    check(status);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return is_uncached() ? &free_uncached_block : &free_block;
  }

  void copy_data(void* to, const void* from, std::size_t size) const override {
    C10_CUDA_CHECK(cudaMemcpy(to, from, size, cudaMemcpyDeviceToDevice));
  }

  using native::CUDAAllocator::recordStream;
  void recordStream(const c10::DataPtr& memory, c10::cuda::CUDAStream stream) override {
    // The owner keeps memory of another process or allocator.
    if (memory.get() != nullptr && memory.get_deleter() == &free_block) {
      check(lowtide_record_stream(memory.get(), stream.stream()));
    }
  }

#if LOWTIDE_TORCH_AT_LEAST(13)
  c10::DataPtr allocateWithAddress(size_t size, void* address) override {
    constexpr uintptr_t alignment = 512;
    const std::string place = pointer_text(address);
    TORCH_CHECK(
        reinterpret_cast<uintptr_t>(address) % alignment == 0,
        "mallocWithAddress: addr must be aligned to kMinBlockSize (512 bytes), got ",
        place);
    const DeviceIndex device = device_of_request();
    if (size == 0) {
      return {nullptr, nullptr, &free_block, cuda_device(device)};
    }
    const auto stream = current_stream(device);
    void* memory = address;
    const auto status = observe(&memory, [&] { return lowtide_allocate_at(address, size, device, stream); });
    // A request larger than every device fails with OUT_OF_MEMORY: nothing is free at that address either.
    TORCH_CHECK(
        status != LOWTIDE_STATUS_NOT_FREE && status != LOWTIDE_STATUS_OUT_OF_MEMORY,
        "Could not allocate CUDA storage at exact address ",
        place);
    check(status);
    notify_allocated(memory, device);
    return {memory, memory, &free_block, cuda_device(device)};
  }
#endif

  // ---- the allocator ----

  // Returns the name that PYTORCH_CUDA_ALLOC_CONF has for PyTorch's own allocator. PyTorch's parser fails if the
  // settings name another backend than this.
  std::string name() override {
    return "native";
  }

  bool initialized() override {
    return device_count > 0;
  }

  void init(int count) override {
    check(lowtide_init(count));
    device_count = std::max(device_count.load(), count);
  }

  void enable(bool value) override {
    is_enabled_ = value;
  }

  bool isEnabled() const override {
    return is_enabled_;
  }

  void emptyCache(MempoolId_t pool = {0, 0}) override {
    History::Cause cause(history_.gather(RecordContext::ALL));
#if !LOWTIDE_TORCH_AT_LEAST(13)
    routes_.end_lost();
#endif
    for (DeviceIndex device = 0; device < device_count; ++device) {
      if (is_default(pool)) {
        check(lowtide_empty_cache(device));
      } else {
        // PyTorch calls this when a pool ends. The pool may be missing on some devices.
        const auto status = lowtide_empty_pool(device, to_lowtide(pool));
        if (status != LOWTIDE_STATUS_POOL) {
          check_end(status);
        }
      }
    }
    cause.rethrow();
  }

  double getMemoryFraction(DeviceIndex device) override {
    double fraction = 1.0;
    check(lowtide_get_memory_fraction(device, &fraction));
    return fraction;
  }

  void setMemoryFraction(double fraction, DeviceIndex device) override {
    check(lowtide_set_memory_fraction(fraction, device));
  }

  void cacheInfo(DeviceIndex device, size_t* largest) override {
    // The driver's free memory counts, too: cuDNN asks how large its workspace may be.
    uint64_t size = 0;
    check(lowtide_largest_free(device, &size));
    *largest = std::max<size_t>(*largest, size);
  }

  // ---- statistics, snapshots, history ----

  DeviceStats getDeviceStats(DeviceIndex device) override {
    return device_stats(device);
  }

  void resetAccumulatedStats(DeviceIndex device) override {
    check(lowtide_reset_accumulated_stats(device));
  }

  void resetPeakStats(DeviceIndex device) override {
    check(lowtide_reset_peak_stats(device));
  }

#if LOWTIDE_TORCH_AT_LEAST(11)
  native::SnapshotInfo snapshot(MempoolId_t pool = {0, 0}, bool include_traces = true) override {
    return take_snapshot(pool, include_traces);
  }
#else
  native::SnapshotInfo snapshot(MempoolId_t pool = {0, 0}) override {
    return take_snapshot(pool, true);
  }
#endif

#if LOWTIDE_TORCH_AT_LEAST(10)
  std::vector<native::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    // A segment's mapped memory may have gaps, and lowtide lists each part. This adds them up.
    std::map<std::tuple<void*, bool, MempoolId_t>, size_t> mapped;
    visit_segments(device, [&](const lowtide_segment& segment, const lowtide_block*, size_t) {
      if (segment.is_expandable) {
        mapped[{segment.stream, segment.is_large, to_torch(segment.pool)}] += segment.size;
      }
    });
    std::vector<native::StreamSegmentSize> sizes;
    for (const auto& [key, size] : mapped) {
      sizes.emplace_back(static_cast<cudaStream_t>(std::get<0>(key)), !std::get<1>(key), size);
    }
    return sizes;
  }
#endif

  bool isHistoryEnabled() override {
    return history_.is_recording();
  }

#if LOWTIDE_TORCH_AT_LEAST(11)
  void recordHistory(
      bool enabled,
      CreateContextFn recorder,
      size_t max_entries,
      RecordContext when,
      bool clear,
      const std::vector<std::string>& skip_actions) override {
    history_.record(enabled, recorder, max_entries, when, clear, skip_actions);
  }
#else
  void recordHistory(bool enabled, CreateContextFn recorder, size_t max_entries, RecordContext when, bool clear)
      override {
    history_.record(enabled, recorder, max_entries, when, clear, {});
  }
#endif

  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) override {
    if (history_.is_recording()) {
      history_.annotate(current_device(), metadata);
    }
  }

  void pushCompileContext(std::string& context) override {
    if (history_.is_recording()) {
      History::compile_contexts.push_back(context);
    }
  }

  void popCompileContext() override {
    // If history was off at the push, there is nothing to pop.
    if (!History::compile_contexts.empty()) {
      History::compile_contexts.pop_back();
    }
  }

#if LOWTIDE_TORCH_AT_LEAST(10)
  void setUserMetadata(const std::string& metadata) override {
    History::user_metadata = metadata;
    check(lowtide_set_metadata(metadata.c_str()));
  }

  std::string getUserMetadata() override {
    return History::user_metadata;
  }
#endif

#if LOWTIDE_TORCH_AT_LEAST(12)
  Context getContextForPointer(const void* memory) override {
    lowtide_allocation allocation{};
    if (lowtide_find_allocation(const_cast<void*>(memory), &allocation) != LOWTIDE_STATUS_OK) {
      return nullptr;
    }
    return history_.block_context(static_cast<DeviceIndex>(allocation.device), allocation.address);
  }
#endif

#if LOWTIDE_TORCH_AT_LEAST(14)
  bool supportsUserMetadata() override {
    return true;
  }

  void annotateMemory(const void* memory, const std::string& metadata) override {
    check(lowtide_annotate(const_cast<void*>(memory), metadata.c_str()));
    if (history_.is_recording()) {
      const auto held = find_allocation(memory);
      const auto device = static_cast<DeviceIndex>(held.device);
      history_.note(
          TraceEntry::ANNOTATE,
          device,
          held.address,
          held.requested,
          static_cast<cudaStream_t>(held.stream),
          to_torch(held.pool),
          history_.gather(RecordContext::ALLOC),
          metadata);
    }
  }
#endif

  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    history_.attach(std::move(tracker));
  }

  void attachOutOfMemoryObserver(native::OutOfMemoryObserver observer) override {
    shortage_.attach(std::move(observer));
  }

#if LOWTIDE_TORCH_AT_LEAST(12)
  void attachOomRejectionObserver(native::OomRejectionObserver observer) override {
    shortage_.attach_to_rejections(std::move(observer));
  }
#endif

  // ---- pools ----

  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool, StreamFilter filter) override {
#if LOWTIDE_TORCH_AT_LEAST(13)
    route(device, pool, std::move(filter));
#else
    end_lost_captures();
    routes_.begin(device, pool, std::move(filter), current_stream(device));
#endif
  }

  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
#if LOWTIDE_TORCH_AT_LEAST(13)
    // Since 2.14, a graph whose capture was abandoned calls this from its destructor.
    check_end(lowtide_end_allocate_to_pool(device, to_lowtide(pool)));
#else
    if (!end_captures([&] { return routes_.end(device, pool); })) {
      // Fails with the right message.
      check(lowtide_end_allocate_to_pool(device, to_lowtide(pool)));
    }
#endif
  }

#if LOWTIDE_TORCH_AT_LEAST(13)
  void markCaptureBegin(DeviceIndex device) override {
    begin_capture(device);
  }

  void markCaptureEnd(DeviceIndex device) override {
    end_captures([&] {
      end_capture(device);
      return true;
    });
  }
#endif

  void releasePool(DeviceIndex device, MempoolId_t pool) override {
    check_end(lowtide_release_pool(device, to_lowtide(pool)));
  }

  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override {
    // A pool that ends in a forked child expects 1.
    int count = 1;
    check_end(lowtide_pool_use_count(device, to_lowtide(pool), &count));
    return count;
  }

#if LOWTIDE_TORCH_AT_LEAST(11)
  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool, Source source = nullptr) override {
    hold_pool(device, pool, std::move(source));
  }

  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use) override {
    check_end(lowtide_set_use_on_oom(device, to_lowtide(pool), use));
  }
#else
  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool, native::CUDAAllocator* source = nullptr) override {
    // The caller keeps it alive.
    hold_pool(device, pool, source == nullptr ? Source() : Source(source, [](native::CUDAAllocator*) {}));
  }

  void setUseOnOOM(DeviceIndex device, MempoolId_t pool) override {
    check_end(lowtide_set_use_on_oom(device, to_lowtide(pool), true));
  }
#endif

#if LOWTIDE_TORCH_AT_LEAST(10)
  void setNoSplit(DeviceIndex device, MempoolId_t pool) override {
    check(lowtide_set_no_split(device, to_lowtide(pool)));
  }
#endif

  bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t pool, const std::unordered_set<void*>& expected)
      override {
    const std::vector<void*> blocks(expected.begin(), expected.end());
    bool is_equal = false;
    check(lowtide_check_live(device, to_lowtide(pool), blocks.data(), blocks.size(), &is_equal));
    return is_equal;
  }

  std::shared_ptr<native::AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t pool) override {
    History::Cause cause(history_.gather(RecordContext::ALL));
    auto checkpoint = std::make_shared<Checkpoint>(device, pool);
    cause.rethrow();
    return checkpoint;
  }

  native::CheckpointDelta setCheckpointPoolState(DeviceIndex device, std::shared_ptr<native::AllocatorState> state)
      override {
    const auto checkpoint = std::dynamic_pointer_cast<Checkpoint>(state);
    TORCH_CHECK(checkpoint != nullptr, "the checkpoint is not one of lowtide's");
    History::Cause cause(history_.gather(RecordContext::STATE));
    const auto blocks = checkpoint->restore(device);
    native::CheckpointDelta delta;
    for (const auto& [memory, size] : blocks.freed) {
      history_.forget(memory);
      notify_profiler(memory, device, -static_cast<int64_t>(size));
      delta.ptrs_freed.push_back(memory);
    }
    for (const auto& [memory, size] : blocks.allocated) {
      notify_profiler(memory, device, static_cast<int64_t>(size));
      delta.dataptrs_allocd.emplace_back(memory, memory, &free_block, cuda_device(device));
    }
    // If this throws, `delta` frees the allocated blocks.
    cause.rethrow();
    return delta;
  }

  // ---- other devices, other processes ----

  void* getBaseAllocation(void* memory, size_t* size) override {
    TORCH_CHECK(
        !find_allocation(memory).is_expandable,
        "memory of expandable segments has no single allocation of the driver behind it; share it through "
        "torch.multiprocessing, or set expandable_segments:False before it is allocated");
    void* base = lowtide_base_alloc(memory, size);
    TORCH_CHECK(base != nullptr, lowtide_last_error());
    return base;
  }

  native::ShareableHandle shareIpcHandle(void* memory) override {
    void* bytes = nullptr;
    size_t length = 0;
    uint64_t offset = 0;
    const auto status = lowtide_share(memory, &bytes, &length, &offset);
    TORCH_CHECK(status != LOWTIDE_STATUS_NOT_ALLOCATED, no_block_at(memory));
    check(status);
    const std::unique_ptr<void, decltype(&lowtide_release_bytes)> owner(bytes, &lowtide_release_bytes);
    return {static_cast<ptrdiff_t>(offset), std::string(static_cast<const char*>(bytes), length)};
  }

  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    // The same handle gives the same address. lowtide keeps a reference count, so every holder detaches once.
    void* memory = nullptr;
    check(lowtide_attach(device_of_request(), handle.data(), handle.size(), &memory));
    return std::shared_ptr<void>(memory, [](void* attached) {
      const auto status = lowtide_detach(attached);
      if (status != LOWTIDE_STATUS_OK && status != LOWTIDE_STATUS_FORKED) {
        TORCH_WARN(lowtide_last_error());
      }
    });
  }

  void enablePeerAccess(DeviceIndex device, DeviceIndex peer) override {
    const c10::cuda::CUDAGuard guard(device);
    const cudaError_t error = C10_CUDA_ERROR_HANDLED(cudaDeviceEnablePeerAccess(peer, 0));
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      C10_CUDA_CLEAR_ERROR();
    } else {
      C10_CUDA_CHECK(error);
    }
    // PyTorch names the accessing device first, lowtide the device that owns the memory.
    check(lowtide_enable_peer_access(peer, device));
  }

  cudaError_t memcpyAsync(
      void* to,
      int to_device,
      const void* from,
      int from_device,
      size_t size,
      cudaStream_t stream,
      bool has_peer_access) override {
    if (has_peer_access || to_device == from_device) {
      return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
    }
    // Without peer access, only this works for mapped memory. It works for cudaMalloc's memory, too.
    return cudaMemcpyPeerAsync(to, to_device, from, from_device, size, stream);
  }

  // Releases memory to the driver that was allocated while caching was off. It rejects any other memory: cudaFree would
  // release one of lowtide's segments.
  void release_uncached(void* memory) {
    {
      const std::lock_guard<std::mutex> lock(uncached_lock_);
      TORCH_CHECK(uncached_.erase(memory) == 1, no_block_at(memory));
    }
    const auto* trace = c10::impl::GPUTrace::get_trace();
    if (C10_UNLIKELY(trace != nullptr)) {
      (*trace)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(memory));
    }
    C10_CUDA_CHECK(cudaFree(memory));
  }

  // Frees a block and notifies observers. If a tracker throws, the block is freed first.
  lowtide_status free(void* memory) {
    const auto* trace = c10::impl::GPUTrace::get_trace();
    if (C10_UNLIKELY(trace != nullptr)) {
      (*trace)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(memory));
    }
    if (C10_LIKELY(!history_.follows_frees() && !c10::memoryProfilingEnabled())) {
      return lowtide_deallocate(memory);
    }
    return free_observed(memory);
  }

 private:
  LowtideAllocator() {
    Shortage::watch();
    check(lowtide_on_dump(&LowtideAllocator::write_snapshot, this));
  }

  // Writes PyTorch's own snapshot if history is recorded, because only that has call stacks.
  static bool write_snapshot(void* self, void (*write)(void*, const void*, size_t), void* to) noexcept {
    try {
      if (!static_cast<LowtideAllocator*>(self)->history_.is_recording()) {
        return false;
      }
      const std::string pickle = torch::cuda::_memory_snapshot_pickled();
      write(to, pickle.data(), pickle.size());
      return true;
    } catch (...) {
      return false;
    }
  }

  // Returns whether every request goes to the driver.
  bool is_uncached() const {
    return C10_UNLIKELY(!is_enabled_.load(std::memory_order_relaxed) || is_caching_forbidden_);
  }

  void* take(size_t size, DeviceIndex device, cudaStream_t stream) {
    void* memory = nullptr;
    if (C10_UNLIKELY(size == 0)) {
      return memory;
    }
    const auto status = ask(size, device, stream, &memory);
    if (C10_UNLIKELY(status != LOWTIDE_STATUS_OK)) {
      ask_again_or_throw(status, size, device, stream, &memory);
    }
    notify_allocated(memory, device);
    return memory;
  }

  // Notifies the profiler and the tracer of an allocation.
  static void notify_allocated(void* memory, DeviceIndex device) {
    if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
      notify_profiler(memory, device, static_cast<int64_t>(find_allocation(memory).size));
    }
    const auto* trace = c10::impl::GPUTrace::get_trace();
    if (C10_UNLIKELY(trace != nullptr)) {
      (*trace)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(memory));
    }
  }

  lowtide_status ask(size_t size, DeviceIndex device, cudaStream_t stream, void** memory) {
    const auto allocate = [&] { return lowtide_allocate(size, device, stream, memory); };
    return history_.is_watching() ? observe(memory, allocate) : allocate();
  }

  C10_NOINLINE void ask_again_or_throw(
      lowtide_status status, size_t size, DeviceIndex device, cudaStream_t stream, void** memory) {
    // lowtide does not wait for events during a capture. Once lost captures have ended, it can.
    if (status == LOWTIDE_STATUS_OUT_OF_MEMORY && end_lost_captures()) {
      status = ask(size, device, stream, memory);
    }
    if (status != LOWTIDE_STATUS_OK) {
      shortage_.refuse(status, size, device, history_);
    }
  }

  // Ends captures even if an observer throws: PyTorch has more to do after this.
  template <typename End>
  bool end_captures(const End& end) {
    Context context;
    try {
      context = history_.gather(RecordContext::ALL);
    } catch (const std::exception& error) {
      TORCH_WARN("the end of a capture has no stack: ", error.what());
    }
    const History::Cause cause(std::move(context));
    const bool is_any = end();
    if (cause.has_thrown()) {
      TORCH_WARN("an observer of memory failed at the end of a capture");
    }
    return is_any;
  }

  // Ends the captures that have failed, and returns whether there were any. Since 2.13, PyTorch reports each end.
  bool end_lost_captures() {
#if LOWTIDE_TORCH_AT_LEAST(13)
    return false;
#else
    return end_captures([&] { return routes_.end_lost(); });
#endif
  }

  // Calls `allocate` and returns its status. Its events get the stack of this call.
  template <typename Allocate>
  lowtide_status observe(void** memory, const Allocate& allocate) {
    History::Cause cause(history_.gather(RecordContext::STATE));
    const auto status = allocate();
    if (C10_UNLIKELY(cause.has_thrown()) && status == LOWTIDE_STATUS_OK) {
      // The caller gets an exception in place of the block.
      lowtide_deallocate(*memory);
    }
    cause.rethrow();
    return status;
  }

  lowtide_status free_observed(void* memory) {
    lowtide_allocation held{};
    const bool is_profiled =
        c10::memoryProfilingEnabled() && lowtide_find_allocation(memory, &held) == LOWTIDE_STATUS_OK;
    History::Cause cause(history_.gather(RecordContext::ALL));
    // This comes after `gather`, which may wait for Python's lock. The lock's holder may end the history meanwhile.
    history_.forget(memory);
    const auto status = lowtide_deallocate(memory);
    if (is_profiled && status == LOWTIDE_STATUS_OK) {
      notify_profiler(memory, static_cast<DeviceIndex>(held.device), -static_cast<int64_t>(held.size));
    }
    cause.rethrow();
    return status;
  }

  // Notifies PyTorch's profiler of an allocation, or of a free if `size` is negative.
  static void notify_profiler(void* memory, DeviceIndex device, int64_t size) {
    if (c10::memoryProfilingEnabled()) {
      uint64_t allocated = 0;
      uint64_t reserved = 0;
      check(lowtide_memory_usage(device, &allocated, &reserved));
      c10::reportMemoryUsageToProfiler(memory, size, allocated, reserved, cuda_device(device));
    }
  }

  native::SnapshotInfo take_snapshot(const MempoolId_t& pool, bool include_traces) {
    native::SnapshotInfo info;
    if (include_traces) {
      info.external_annotations = history_.annotations();
    }
    for (DeviceIndex device = 0; device < device_count; ++device) {
      if (include_traces) {
        info.device_traces.push_back(history_.trace(device));
      }
      auto segments = snapshot_segments(history_, device, pool);
      std::move(segments.begin(), segments.end(), std::back_inserter(info.segments));
    }
    info.config_metadata = config_info();
    return info;
  }

  static void hold_pool(DeviceIndex device, const MempoolId_t& pool, Source source) {
    check(lowtide_retain_pool(device, to_lowtide(pool)));
    if (source == nullptr) {
      return;
    }
    try {
      set_source(device, pool, std::move(source));
    } catch (...) {
      lowtide_release_pool(device, to_lowtide(pool));
      throw;
    }
  }

  void* allocate_uncached(size_t size) {
    void* memory = nullptr;
    if (size != 0) {
      C10_CUDA_CHECK(cudaMalloc(&memory, size));
      {
        const std::lock_guard<std::mutex> lock(uncached_lock_);
        uncached_.insert(memory);
      }
      const auto* trace = c10::impl::GPUTrace::get_trace();
      if (C10_UNLIKELY(trace != nullptr)) {
        (*trace)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(memory));
      }
    }
    return memory;
  }

  History history_;
  Shortage shortage_;
  std::atomic<bool> is_enabled_{true};
  // PyTorch reads both names on both kinds of cards.
  const bool is_caching_forbidden_ = c10::utils::check_env("PYTORCH_NO_CUDA_MEMORY_CACHING") == true ||
                                     c10::utils::check_env("PYTORCH_NO_HIP_MEMORY_CACHING") == true;
  std::mutex uncached_lock_;
  // Memory that was allocated while caching was off.
  std::unordered_set<void*> uncached_;
#if !LOWTIDE_TORCH_AT_LEAST(13)
  Routes routes_;
#endif
};

inline void free_block(void* memory) {
  // A deleter cannot throw.
  try {
    const auto status = LowtideAllocator::instance().free(memory);
    // A forked child may free tensors that it has inherited: ignore it.
    if (C10_UNLIKELY(status != LOWTIDE_STATUS_OK && status != LOWTIDE_STATUS_FORKED)) {
      TORCH_WARN(lowtide_last_error());
    }
  } catch (const std::exception& error) {
    TORCH_WARN(error.what());
  } catch (...) {
    TORCH_WARN("a tracker of memory threw what is no std::exception");
  }
}

inline void free_uncached_block(void* memory) {
  LowtideAllocator::instance().release_uncached(memory);
}

}  // namespace lowtide
