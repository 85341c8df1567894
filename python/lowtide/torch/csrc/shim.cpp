// lowtide in the place of PyTorch's CUDA allocator.
//
// Built against the PyTorch that it is loaded into, since no two of its versions share the layout of that class. One
// translation unit, because nearly all the time goes into reading PyTorch's headers; plain C outside, so that neither
// Python's headers nor its version matter. The functions of lowtide.h are found in liblowtide.so, which the process
// has loaded before, for all to see.
//
//   allocator.h    the class: what each of PyTorch's functions comes to
//   history.h      events, and on whose behalf they happened
//   snapshot.h     what is held
//   statistics.h   figures
//   pools.h        memory pools and checkpoints of them
//   holders.h      who holds the most memory
//   processes.h    who else has memory of the device
//   shortage.h     memory that runs out
//   workspaces.h   what PyTorch keeps for cuBLAS
//   status.h       lowtide's answers as exceptions
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
        " has served memory already: install it right after torch is imported, or use `python -m lowtide run`");
  }
  native::allocator.store(ours);
  // torch.accelerator asks here. PyTorch's own allocator has priority 0, and no other is known to register.
  constexpr uint8_t priority = 200;
  c10::SetAllocator(c10::kCUDA, ours, priority);
}

}  // namespace lowtide

// Puts lowtide in the place of PyTorch's CUDA allocator for the rest of the process. Returns null, or why that cannot
// be; the text belongs to the shim and is valid until the next call.
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

// Whether PyTorch's memory is lowtide's: a program may have put another allocator in its place since.
extern "C" __attribute__((visibility("default"))) bool lowtide_torch_is_installed() noexcept {
  return lowtide::native::get() == &lowtide::LowtideAllocator::instance();
}

// As `lowtide_pause`, or `lowtide_pause_and_drop` if nothing is to be kept; takes from PyTorch what it keeps for cuBLAS in
// the memory that leaves.
extern "C" __attribute__((visibility("default"))) lowtide_status lowtide_torch_pause(const char* tag, bool keep) noexcept {
  return lowtide::pause_regions(tag, keep);
}

// As `lowtide_resume`; gives that back.
extern "C" __attribute__((visibility("default"))) lowtide_status lowtide_torch_resume(const char* tag) noexcept {
  return lowtide::resume_regions(tag);
}

// Returns what the last of these in this thread said that failed.
extern "C" __attribute__((visibility("default"))) const char* lowtide_torch_change_error() noexcept {
  return lowtide::change_error.c_str();
}
