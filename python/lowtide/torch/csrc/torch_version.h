// The version of PyTorch that this is built against, and names that moved between versions.
#pragma once

// PyTorch's own CUDA build defines this. Without it, its headers say that expandable segments do not exist.
#ifndef PYTORCH_C10_DRIVER_API_SUPPORTED
#define PYTORCH_C10_DRIVER_API_SUPPORTED
#endif

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/csrc/api/include/torch/version.h>

// Whether this PyTorch is 2.`minor` or newer.
#define LOWTIDE_TORCH_AT_LEAST(minor) \
  (TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= (minor)))

#if !LOWTIDE_TORCH_AT_LEAST(8)
#error "lowtide needs PyTorch 2.8 or newer"
#endif

namespace lowtide {

namespace native = c10::cuda::CUDACachingAllocator;

// Up to 2.10, the types of histories and snapshots are in the allocator's own namespace.
#if LOWTIDE_TORCH_AT_LEAST(11)
namespace entries = c10::CachingDeviceAllocator;
#else
namespace entries = c10::cuda::CUDACachingAllocator;
#endif
using entries::AllocatorTraceTracker;
using entries::AnnotationEntry;
using entries::BlockInfo;
using entries::CreateContextFn;
using entries::RecordContext;
using entries::SegmentInfo;
using entries::TraceEntry;

using c10::Device;
using c10::DeviceIndex;
using c10::CachingDeviceAllocator::DeviceStats;
using c10::cuda::MempoolId_t;

// The call stack that `record_memory_history` gathers.
using Context = std::shared_ptr<c10::GatheredContext>;

inline Device cuda_device(DeviceIndex device) {
  return Device(c10::DeviceType::CUDA, device);
}

}  // namespace lowtide
