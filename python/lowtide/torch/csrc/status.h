// lowtide's answers as PyTorch's exceptions, and its pool numbers as PyTorch's.
#pragma once

#include "torch_version.h"

#include <c10/cuda/CUDAException.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <lowtide.h>

#include <cstdint>
#include <cstdio>
#include <iterator>
#include <string>

namespace lowtide {

// Throws what the last call that failed in this thread says.
[[noreturn]] inline void fail(lowtide_status status) {
  // CUDA keeps the error of a call that failed, and would tell it to whoever asks next.
  C10_CUDA_CLEAR_ERROR();
  TORCH_CHECK_WITH(OutOfMemoryError, status != LOWTIDE_STATUS_OUT_OF_MEMORY, lowtide_last_error());
  TORCH_CHECK_VALUE(status != LOWTIDE_STATUS_CONFIG, lowtide_last_error());
  TORCH_CHECK(false, lowtide_last_error());
}

// Throws unless the call did what was asked.
inline void check(lowtide_status status) {
  if (C10_UNLIKELY(status != LOWTIDE_STATUS_OK)) {
    fail(status);
  }
}

// As `check`, for what the destructors of PyTorch's objects call, which end the process if it throws. A forked child
// drops what it has inherited, such as a graph in a cycle of Python's, and has no memory of the device to give back.
inline void check_end(lowtide_status status) {
  if (status != LOWTIDE_STATUS_FORKED) {
    check(status);
  }
}

inline lowtide_mempool to_lowtide(const MempoolId_t& pool) {
  return {pool.first, pool.second};
}

inline MempoolId_t to_torch(const lowtide_mempool& pool) {
  return {pool.capture, pool.user};
}

inline bool is_default(const MempoolId_t& pool) {
  return pool.first == 0 && pool.second == 0;
}

// A pointer as a stream writes it. Not by one: a compiler that links its library statically gives the shim streams of
// its own, which nobody has set up.
inline std::string pointer_text(const void* memory) {
  char address[2 + 2 * sizeof(void*) + 1];
  std::snprintf(address, sizeof address, "%p", memory);
  return address;
}

// A size as PyTorch writes it.
inline std::string in_words(uint64_t bytes) {
  constexpr const char* units[] = {"KiB", "MiB", "GiB"};
  if (bytes <= 1024) {
    return std::to_string(bytes) + " bytes";
  }
  double size = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; size > 1024 && unit + 1 < std::size(units); ++unit) {
    size /= 1024;
  }
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f %s", size, units[unit]);
  return text;
}

// Says that there is no block at `memory`, in PyTorch's words.
inline std::string no_block_at(const void* memory) {
  return "invalid device pointer: " + pointer_text(memory);
}

// The block that the program holds at `memory`; an exception in PyTorch's words if there is none.
inline lowtide_allocation find_allocation(const void* memory) {
  lowtide_allocation allocation{};
  const auto status = lowtide_find_allocation(const_cast<void*>(memory), &allocation);
  TORCH_CHECK(status != LOWTIDE_STATUS_NOT_ALLOCATED, no_block_at(memory));
  check(status);
  return allocation;
}

}  // namespace lowtide
