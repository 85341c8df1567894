// The statistics of torch.cuda.memory_stats.
#pragma once

#include "status.h"

#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

namespace lowtide {

namespace figures {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;

inline constexpr std::pair<std::string_view, StatArray DeviceStats::*> kByPool[] = {
    {"allocation", &DeviceStats::allocation},
    {"segment", &DeviceStats::segment},
    {"active", &DeviceStats::active},
    {"inactive_split", &DeviceStats::inactive_split},
    {"allocated_bytes", &DeviceStats::allocated_bytes},
    {"reserved_bytes", &DeviceStats::reserved_bytes},
    {"active_bytes", &DeviceStats::active_bytes},
    {"inactive_split_bytes", &DeviceStats::inactive_split_bytes},
    {"requested_bytes", &DeviceStats::requested_bytes},
};

inline constexpr std::pair<std::string_view, Stat DeviceStats::*> kWhole[] = {
    {"oversize_allocations", &DeviceStats::oversize_allocations},
    {"oversize_segments", &DeviceStats::oversize_segments},
};

inline constexpr std::pair<std::string_view, int64_t DeviceStats::*> kCounts[] = {
    {"num_alloc_retries", &DeviceStats::num_alloc_retries},
    {"num_ooms", &DeviceStats::num_ooms},
    {"num_sync_all_streams", &DeviceStats::num_sync_all_streams},
    {"num_device_alloc", &DeviceStats::num_device_alloc},
    {"num_device_free", &DeviceStats::num_device_free},
    {"max_split_size", &DeviceStats::max_split_size},
#if LOWTIDE_TORCH_AT_LEAST(12)
    {"num_oom_rejections", &DeviceStats::num_oom_rejections},
#endif
};

// The order of PyTorch's StatType.
inline constexpr std::string_view kPools[] = {"all", "small_pool", "large_pool"};

inline constexpr std::pair<std::string_view, int64_t Stat::*> kMembers[] = {
    {"current", &Stat::current},
    {"peak", &Stat::peak},
    {"allocated", &Stat::allocated},
    {"freed", &Stat::freed},
};

// Returns the entry of a table with this name, or null.
template <typename Entry, size_t count>
const Entry* find(const Entry (&table)[count], std::string_view name) {
  for (const Entry& entry : table) {
    if (entry.first == name) {
      return &entry;
    }
  }
  return nullptr;
}

// Removes the part before the next dot from a key, and returns it.
inline std::string_view take_part(std::string_view& key) {
  const size_t dot = key.find('.');
  const std::string_view part = key.substr(0, dot);
  key = dot == std::string_view::npos ? std::string_view() : key.substr(dot + 1);
  return part;
}

// Sets the figure that `key` names, like "peak".
inline void set(Stat& stat, std::string_view key, int64_t value) {
  if (const auto* member = find(kMembers, key)) {
    stat.*member->second = value;
  }
}

// Sets the figure that `key` names, like "large_pool.peak".
inline void set(StatArray& stats, std::string_view key, int64_t value) {
  const std::string_view pool = take_part(key);
  for (size_t index = 0; index < std::size(kPools); ++index) {
    if (kPools[index] == pool) {
      set(stats[index], key, value);
    }
  }
}

#if LOWTIDE_TORCH_AT_LEAST(13)
// Sets a figure of a private pool; `key` is like "3_0.large_pool.peak".
inline void set_private(DeviceStats& stats, std::string_view key, int64_t value) {
  const std::string number(take_part(key));
  char* end = nullptr;
  const auto capture = std::strtoull(number.c_str(), &end, 10);
  const auto user = *end == '_' ? std::strtoull(end + 1, nullptr, 10) : 0;
  set(stats.reserved_bytes_by_private_pools[MempoolId_t(capture, user)], key, value);
}
#endif

// Sets the figure that `key` names; ignores a name that this PyTorch does not have.
inline void set(DeviceStats& stats, std::string_view key, int64_t value) {
  const std::string_view name = take_part(key);
  if (const auto* by_pool = find(kByPool, name)) {
    set(stats.*by_pool->second, key, value);
  } else if (const auto* whole = find(kWhole, name)) {
    set(stats.*whole->second, key, value);
  } else if (const auto* count = find(kCounts, name)) {
    stats.*count->second = value;
  }
#if LOWTIDE_TORCH_AT_LEAST(13)
  else if (name == "reserved_bytes_by_private_pools") {
    set_private(stats, key, value);
  }
#endif
}

}  // namespace figures

// Returns every figure of a device, in lowtide's order.
inline std::vector<lowtide_memory_stat> list_figures(DeviceIndex device) {
  // Room for a few private pools. If it is too little, the call returns the size that it needs.
  std::vector<lowtide_memory_stat> list(256);
  for (;;) {
    size_t count = 0;
    const auto status = lowtide_memory_stats(device, list.data(), list.size(), &count);
    if (status != LOWTIDE_STATUS_TOO_SMALL) {
      check(status);
      list.resize(count);
      return list;
    }
    list.resize(count);
  }
}

inline DeviceStats device_stats(DeviceIndex device) {
  DeviceStats stats;
  for (const auto& figure : list_figures(device)) {
    figures::set(stats, figure.key, figure.value);
  }
  return stats;
}

}  // namespace lowtide
