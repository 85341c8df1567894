// Snapshots for torch.cuda.memory._snapshot.
#pragma once

#include "history.h"

#include <c10/cuda/CUDAAllocatorConfig.h>
#if LOWTIDE_TORCH_AT_LEAST(10)
#include <c10/core/AllocatorConfig.h>
#endif

#include <algorithm>
#include <exception>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace lowtide {

inline SegmentInfo segment_info(
    History& history,
    const lowtide_segment& segment,
    const lowtide_block* blocks,
    size_t count) {
  SegmentInfo info;
  info.device = static_cast<DeviceIndex>(segment.device);
  info.address = segment.address;
  info.total_size = segment.size;
  info.stream = static_cast<cudaStream_t>(segment.stream);
  info.is_large = segment.is_large;
  info.is_expandable = segment.is_expandable;
  info.owner_private_pool_id = to_torch(segment.pool);
#if LOWTIDE_TORCH_AT_LEAST(11)
  // All ranks register a pool's segments with NCCL in this order.
  info.registration_counter = static_cast<decltype(info.registration_counter)>(segment.number);
#endif
  info.context_when_allocated = history.segment_context(info.device, segment.address, segment.size);
  info.blocks.reserve(count);
  for (size_t index = 0; index < count; ++index) {
    const lowtide_block& block = blocks[index];
    BlockInfo& held = info.blocks.emplace_back();
    held.size = block.size;
    held.requested_size = block.requested;
    held.allocated = block.state == LOWTIDE_BLOCK_STATE_ALLOCATED;
    held.active = block.state != LOWTIDE_BLOCK_STATE_INACTIVE;
    if (held.allocated) {
      info.allocated_size += block.size;
    }
    if (held.active) {
      info.active_size += block.size;
      info.requested_size += block.requested;
      held.context_when_allocated = history.block_context(info.device, block.address);
    }
  }
  return info;
}

// Returns the segments of a pool by address, or all segments for the default pool. Records a snapshot event.
//
// ProcessGroupNCCL asks for a pool's segments to register or deregister them with NCCL; its tracker handles later
// changes. A pool's paused segments are left out: trackers were notified that they are freed, and are notified again at
// the resume.
inline std::vector<SegmentInfo> snapshot_segments(History& history, DeviceIndex device, const MempoolId_t& pool) {
  std::vector<SegmentInfo> segments;
  size_t active = 0;
  visit_segments(device, [&](const lowtide_segment& segment, const lowtide_block* blocks, size_t count) {
    if (is_default(pool) || (to_torch(segment.pool) == pool && !segment.is_paused)) {
      active += segments.emplace_back(segment_info(history, segment, blocks, count)).active_size;
    }
  });
  history.note(TraceEntry::SNAPSHOT, device, 0, active, nullptr, pool, nullptr, History::user_metadata);
  return segments;
}

// Returns lowtide's strategy with its options. For `caching` it returns only the options, which are PyTorch's; without
// options the text is empty, as PyTorch's is.
inline std::string settings_in_force() {
  constexpr std::string_view caching = "caching";
  const char* config = lowtide_config();
  std::string_view text = config != nullptr ? config : "";
  if (text == caching) {
    return {};
  }
  if (text.substr(0, caching.size() + 1) == "caching:") {
    text.remove_prefix(caching.size() + 1);
  }
  return std::string(text);
}

// Returns the settings in force. Settings of device memory are lowtide's, and may differ from what PyTorch was given.
// Settings of locks and pinned memory are PyTorch's.
inline native::AllocatorConfigInfo config_info() {
  using Config = native::CUDAAllocatorConfig;
  native::AllocatorConfigInfo info{};
#if LOWTIDE_TORCH_AT_LEAST(10)
  using Common = c10::CachingAllocator::AcceleratorAllocatorConfig;
  info.last_allocator_settings = c10::CachingAllocator::getAllocatorSettings();
#else
  info.last_allocator_settings = Config::last_allocator_settings();
#endif
  lowtide_caching_settings settings{};
  check(lowtide_settings_in_force(info.last_allocator_settings.c_str(), &settings));
  if (!settings.are_given) {
    info.last_allocator_settings = settings_in_force();
  }
  info.garbage_collection_threshold = settings.garbage_collection_threshold;
  info.max_split_size = settings.max_split_size;
  info.roundup_power2_divisions.assign(
      std::begin(settings.roundup_power2_divisions), std::end(settings.roundup_power2_divisions));
  info.expandable_segments = settings.expandable_segments;
  info.pinned_num_register_threads = Config::pinned_num_register_threads();
  info.release_lock_on_malloc = Config::release_lock_on_cudamalloc();
  info.pinned_use_host_register = Config::pinned_use_cuda_host_register();
#if LOWTIDE_TORCH_AT_LEAST(9)
  info.graph_capture_record_stream_reuse = settings.graph_capture_record_stream_reuse;
#endif
#if LOWTIDE_TORCH_AT_LEAST(13)
  info.max_round_threshold = Common::pinned_max_round_threshold();
  info.max_cached_size = Common::pinned_max_cached_size();
#endif
  return info;
}

}  // namespace lowtide
