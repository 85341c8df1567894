// The shim: lowtide as PyTorch's CUDA allocator.
//
// It is built against the PyTorch that loads it, because every version lays out the allocator class differently. It is
// one translation unit, because reading PyTorch's headers takes nearly all the time. Its interface is plain C, so it
// needs no headers of Python and works with any version of Python. The functions of lowtide.h come from liblowtide.so,
// which the process has loaded before with RTLD_GLOBAL.
//
//   allocator.h    the class that implements PyTorch's interface
//   history.h      events and their call stacks
//   snapshot.h     snapshots: segments and blocks
//   statistics.h   memory statistics
//   pools.h        memory pools and their checkpoints
//   holders.h      the call sites that hold the most memory
//   processes.h    the memory that each process uses on a device
//   shortage.h     out-of-memory errors
//   workspaces.h   PyTorch's cuBLAS workspaces
//   status.h       lowtide's status codes as exceptions
#include "allocator.h"
#include "workspaces.h"

#include <exception>
#include <stdexcept>
#include <string>

namespace lowtide {

static void install() {
  if (lowtide_abi_version() != LOWTIDE_ABI_VERSION) {
    throw std::runtime_error("the shim was built for another version of liblowtide.so");
  }
  auto* present = native::get();
  auto* ours = &LowtideAllocator::instance();
  if (present == ours) {
    return;
  }
  if (present->initialized()) {
    throw std::runtime_error(
        "lowtide must be installed before PyTorch uses CUDA, and " + present->name() +
        " has served memory already: install it right after torch is imported, or use `lowtide run`");
  }
  native::allocator.store(ours);
  // torch.accelerator looks here. PyTorch's own allocator has priority 0; no other allocator is known to register.
  constexpr uint8_t priority = 200;
  c10::SetAllocator(c10::kCUDA, ours, priority);
}

}  // namespace lowtide

// Makes lowtide PyTorch's CUDA allocator for the rest of the process. Returns null, or the reason for the failure. The
// text belongs to the shim and is valid until the next call.
extern "C" __attribute__((visibility("default"))) const char* lowtide_torch_install() noexcept {
  static std::string reason;
  try {
    lowtide::install();
    return nullptr;
  } catch (const c10::Error& error) {
    reason = error.what_without_backtrace();
  } catch (const std::exception& error) {
    reason = error.what();
  }
  return reason.c_str();
}

// Returns whether lowtide is PyTorch's allocator. A program may have installed another one since.
extern "C" __attribute__((visibility("default"))) bool lowtide_torch_is_installed() noexcept {
  return lowtide::native::get() == &lowtide::LowtideAllocator::instance();
}

// Calls `lowtide_pause`, or `lowtide_pause_and_drop` if `keep` is false. Detaches PyTorch's cuBLAS workspaces in the
// paused memory.
extern "C" __attribute__((visibility("default"))) lowtide_status lowtide_torch_pause(const char* tag, bool keep) noexcept {
  return lowtide::pause_regions(tag, keep);
}

// Calls `lowtide_resume` and reattaches the workspaces.
extern "C" __attribute__((visibility("default"))) lowtide_status lowtide_torch_resume(const char* tag) noexcept {
  return lowtide::resume_regions(tag);
}

// Returns the error message of this thread's last pause or resume that failed.
extern "C" __attribute__((visibility("default"))) const char* lowtide_torch_change_error() noexcept {
  return lowtide::change_error.c_str();
}
