// Conversions: lowtide's status codes to PyTorch's exceptions, and pool ids in both directions.
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

// Throws the error of this thread's last call that failed.
[[noreturn]] inline void fail(lowtide_status status) {
  // CUDA keeps the error of a failed call and would report it to the next cudaGetLastError.
  C10_CUDA_CLEAR_ERROR();
  TORCH_CHECK_WITH(OutOfMemoryError, status != LOWTIDE_STATUS_OUT_OF_MEMORY, lowtide_last_error());
  TORCH_CHECK_VALUE(status != LOWTIDE_STATUS_CONFIG, lowtide_last_error());
  TORCH_CHECK(false, lowtide_last_error());
}

// Throws unless the status is OK.
inline void check(lowtide_status status) {
  if (C10_UNLIKELY(status != LOWTIDE_STATUS_OK)) {
    fail(status);
  }
}

// Like `check`, for functions that destructors of PyTorch's objects call: an exception there ends the process. A forked
// child destroys objects that it has inherited, such as a graph in a reference cycle, and has no device memory to free.
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

// Returns a pointer as text, as `std::ostream` writes it. It does not use one: a compiler that links libstdc++
// statically gives the shim its own streams, which are not initialized.
inline std::string pointer_text(const void* memory) {
  char address[2 + 2 * sizeof(void*) + 1];
  std::snprintf(address, sizeof address, "%p", memory);
  return address;
}

// Returns a size as text, as PyTorch writes it.
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

// Returns PyTorch's error message for an address without a block.
inline std::string no_block_at(const void* memory) {
  return "invalid device pointer: " + pointer_text(memory);
}

// Returns the allocated block at `memory`. Throws with PyTorch's error message if there is none.
inline lowtide_allocation find_allocation(const void* memory) {
  lowtide_allocation allocation{};
  const auto status = lowtide_find_allocation(const_cast<void*>(memory), &allocation);
  TORCH_CHECK(status != LOWTIDE_STATUS_NOT_ALLOCATED, no_block_at(memory));
  check(status);
  return allocation;
}

}  // namespace lowtide
