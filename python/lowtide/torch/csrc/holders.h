// The call sites that hold the most memory: a line of the out-of-memory error.
#pragma once

#include "snapshot.h"

#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lowtide {

// The number of largest blocks whose call stacks are looked up. Each look-up takes some microseconds.
constexpr size_t kHoldersMax = 1000;

// The number of call sites that the line names.
constexpr size_t kCallSitesMax = 3;

struct HeldBlock {
  uint64_t size;
  Context context;
};

// Returns the largest allocated blocks of a device that have a call stack. Paused blocks are not on the device.
inline std::vector<HeldBlock> largest_held(History& history, DeviceIndex device) {
  std::vector<HeldBlock> held;
  visit_segments(device, [&](const lowtide_segment& segment, const lowtide_block* blocks, size_t count) {
    for (size_t index = 0; index < count && !segment.is_paused; ++index) {
      if (blocks[index].state != LOWTIDE_BLOCK_STATE_ALLOCATED) {
        continue;
      }
      if (auto context = history.block_context(device, blocks[index].address)) {
        held.push_back({blocks[index].size, std::move(context)});
      }
    }
  });
  const auto kept = held.begin() + static_cast<std::ptrdiff_t>(std::min(held.size(), kHoldersMax));
  std::partial_sort(
      held.begin(), kept, held.end(), [](const HeldBlock& a, const HeldBlock& b) { return a.size > b.size; });
  held.erase(kept, held.end());
  return held;
}

// Returns whether a frame is in the program, not in a package or Python itself, as `lowtide leaks` and the page do.
inline bool is_of_program(const torch::unwind::Frame& frame) {
  const std::string_view file = frame.filename;
  constexpr std::string_view suffix = ".py";
  const bool is_python = file.size() >= suffix.size() && file.substr(file.size() - suffix.size()) == suffix;
  constexpr std::string_view others[] = {"site-packages/", "dist-packages/", "lib/python3.", "lib64/python3."};
  const auto is_in = [&](std::string_view path) { return file.find(path) != std::string_view::npos; };
  return is_python && std::none_of(std::begin(others), std::end(others), is_in);
}

// Returns the program's innermost functions in a call stack, or the innermost function if none is the program's.
inline std::string call_site_of(const std::vector<torch::unwind::Frame>& frames, const std::vector<uint64_t>& stack) {
  constexpr size_t named_max = 2;
  std::string call_site;
  size_t named = 0;
  const auto add = [&](const torch::unwind::Frame& frame) {
    call_site += named++ == 0 ? "" : " < ";
    call_site += frame.funcname + " (" + frame.filename + ":" + std::to_string(frame.lineno) + ")";
  };
  for (const uint64_t index : stack) {
    if (named < named_max && is_of_program(frames.at(index))) {
      add(frames.at(index));
    }
  }
  if (named == 0 && !stack.empty()) {
    add(frames.at(stack.front()));
  }
  return call_site;
}

// Returns the line, with a line break before it; an empty text if no block has a call stack. Takes Python's lock.
inline std::string holders_by_stack(History& history, DeviceIndex device) {
  const auto held = largest_held(history, device);
  std::vector<torch::CapturedTraceback*> contexts;
  std::vector<uint64_t> sizes;
  for (const HeldBlock& block : held) {
    if (auto* context = dynamic_cast<torch::CapturedTraceback*>(block.context.get())) {
      contexts.push_back(context);
      sizes.push_back(block.size);
    }
  }
  if (contexts.empty()) {
    return "";
  }
  const auto symbolized = torch::symbolize(contexts);
  struct Share {
    uint64_t bytes = 0;
    size_t blocks = 0;
  };
  std::map<std::string, Share> by_call_site;
  for (size_t index = 0; index < sizes.size(); ++index) {
    Share& share = by_call_site[call_site_of(symbolized.all_frames, symbolized.tracebacks.at(index))];
    share.bytes += sizes[index];
    share.blocks += 1;
  }
  std::vector<std::pair<std::string, Share>> call_sites(by_call_site.begin(), by_call_site.end());
  std::sort(call_sites.begin(), call_sites.end(), [](const auto& a, const auto& b) {
    return a.second.bytes > b.second.bytes;
  });
  std::string line = "\nBiggest holders by call stack: ";
  for (size_t index = 0; index < std::min(call_sites.size(), kCallSitesMax); ++index) {
    const auto& [call_site, share] = call_sites[index];
    line += index == 0 ? "" : "; ";
    line += in_words(share.bytes) + " in " + std::to_string(share.blocks) + (share.blocks == 1 ? " block" : " blocks");
    line += " from " + call_site;
  }
  return line + ".";
}

}  // namespace lowtide
