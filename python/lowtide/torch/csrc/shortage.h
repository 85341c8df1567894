// Out-of-memory errors: callbacks that free memory before, observers, and the exception.
#pragma once

#include "holders.h"
#include "processes.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lowtide {

class Shortage {
 public:
  // Makes lowtide call PyTorch's registered FreeMemoryCallbacks before it asks the driver for more memory.
  static void watch() {
    check(lowtide_on_shortage(&Shortage::free_memory, nullptr));
  }

  void attach(native::OutOfMemoryObserver observer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    observers_.push_back(std::move(observer));
  }

#if LOWTIDE_TORCH_AT_LEAST(12)
  void attach_to_rejections(native::OomRejectionObserver observer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    rejection_observers_.push_back(std::move(observer));
  }
#endif

  // Throws the error of a failed request. Notifies the observers of out-of-memory errors first.
  [[noreturn]] void refuse(lowtide_status status, size_t size, DeviceIndex device, History& history) {
    lowtide_out_of_memory figures{};
    const bool has_run_out =
        status == LOWTIDE_STATUS_OUT_OF_MEMORY && lowtide_last_out_of_memory(&figures) == LOWTIDE_STATUS_OK;
    // A request larger than every device is no shortage: do not notify observers.
    if (!has_run_out || figures.device_total == 0) {
      fail(status);
    }
    // Copy the text first: an observer may call lowtide, and the next call that fails replaces it.
    std::string text = with_processes(lowtide_last_error(), device);
    text.insert(std::min(text.find('\n'), text.size()), known_holders(history, device));
    C10_CUDA_CLEAR_ERROR();
    c10::reportOutOfMemoryToProfiler(
        static_cast<int64_t>(size), figures.allocated, figures.reserved, cuda_device(device));
    notify(figures);
    TORCH_CHECK_WITH(OutOfMemoryError, false, text);
  }

 private:
  // Inserts each process's memory where PyTorch has it: after the device's free memory.
  static std::string with_processes(std::string text, DeviceIndex device) {
    constexpr std::string_view before = " is free. ";
    const size_t found = text.find(before);
    if (found != std::string::npos) {
      text.insert(found + before.size(), memory_by_process(device));
    }
    return text;
  }

  // Returns the line about the call sites that hold the most memory, if history is recorded. An exception here must not
  // replace the out-of-memory error.
  static std::string known_holders(History& history, DeviceIndex device) noexcept {
    try {
      const char* wanted = std::getenv("LOWTIDE_OOM_EXPLAIN");
      const bool is_unwanted = wanted != nullptr && std::strcmp(wanted, "0") == 0;
      return history.is_recording() && !is_unwanted ? holders_by_stack(history, device) : "";
    } catch (...) {
      return "";
    }
  }

  static bool free_memory(void*, int device) noexcept {
    bool has_freed = false;
    try {
      auto* registry = c10::FreeCudaMemoryCallbacksRegistry();
      for (const auto& name : registry->Keys()) {
        has_freed |= registry->Create(name)->Execute();
      }
      keep_current_stream(static_cast<DeviceIndex>(device));
    } catch (...) {
      // The request goes on without the callbacks.
    }
    return has_freed;
  }

  // Registers this thread's stream with lowtide as never destroyed, if it is from PyTorch's pools. The id of an external
  // stream is its address.
  static void keep_current_stream(DeviceIndex device) {
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
    if (stream.id() != reinterpret_cast<c10::StreamId>(stream.stream())) {
      // If this fails, other streams get the stream's cached memory later.
      (void)lowtide_keep_stream(device, stream.stream());
    }
  }

  // Notifies the observers, without a lock: they may take Python's lock and call lowtide.
  void notify(const lowtide_out_of_memory& figures) {
#if LOWTIDE_TORCH_AT_LEAST(12)
    if (figures.is_rejected) {
      for (const auto& observer : copy(rejection_observers_)) {
        observer(figures.device, figures.segment_size, figures.allocated, figures.device_total);
      }
      return;
    }
#endif
    const uint64_t limit = figures.limit == 0 ? figures.device_total : figures.limit;
    for (const auto& observer : copy(observers_)) {
      observer(figures.device, figures.segment_size, limit, figures.device_free);
    }
  }

  template <typename Observer>
  std::vector<Observer> copy(const std::vector<Observer>& observers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return observers;
  }

  // Guards the members below.
  std::mutex mutex_;
  std::vector<native::OutOfMemoryObserver> observers_;
#if LOWTIDE_TORCH_AT_LEAST(12)
  std::vector<native::OomRejectionObserver> rejection_observers_;
#endif
};

}  // namespace lowtide
