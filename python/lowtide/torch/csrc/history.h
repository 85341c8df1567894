// The history for torch.cuda.memory._record_memory_history: call stacks of allocated blocks, and a trace of events.
#pragma once

#include "status.h"

#include <c10/util/ApproximateClock.h>

#include <array>
#include <atomic>
#include <deque>
#include <exception>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace lowtide {

// The number of devices that PyTorch has found; 0 until it initializes CUDA.
inline std::atomic<int> device_count{0};

// Calls `visit` for every segment of a device, under lowtide's locks: it must not call lowtide.
template <typename Visit>
void visit_segments(DeviceIndex device, Visit visit) {
  struct Visitor {
    Visit& visit;
    std::exception_ptr thrown;
  } visitor{visit, nullptr};
  const auto call = [](void* context, const lowtide_segment* segment, const lowtide_block* blocks, size_t count) {
    auto& visitor = *static_cast<Visitor*>(context);
    try {
      if (visitor.thrown == nullptr) {
        visitor.visit(*segment, blocks, count);
      }
    } catch (...) {
      visitor.thrown = std::current_exception();
    }
  };
  check(lowtide_visit_segments(device, call, &visitor));
  if (visitor.thrown != nullptr) {
    std::rethrow_exception(visitor.thrown);
  }
}

// A set of addresses that may give false positives (a Bloom filter). A thread checks it before it takes a lock.
class AddressFilter {
 public:
  void insert(uint64_t address) {
    const auto [word, bit] = place(address);
    words_[word].fetch_or(bit, std::memory_order_relaxed);
  }

  void clear() {
    for (auto& word : words_) {
      word.store(0, std::memory_order_relaxed);
    }
  }

  bool may_contain(uint64_t address) const {
    const auto [word, bit] = place(address);
    return (words_[word].load(std::memory_order_relaxed) & bit) != 0;
  }

 private:
  // 32 KiB: with 10,000 addresses in it, one other address in 27 is a false positive.
  static constexpr unsigned int kBitsLog2 = 18;

  static std::pair<size_t, uint64_t> place(uint64_t address) {
    const uint64_t hash = (address * 0x9e3779b97f4a7c15) >> (64 - kBitsLog2);
    return {hash / 64, uint64_t{1} << (hash % 64)};
  }

  std::array<std::atomic<uint64_t>, (size_t{1} << kBitsLog2) / 64> words_{};
};

// The observer of lowtide's events. lowtide notifies it only while history is recorded or a tracker is attached, so
// other programs pay nothing. After that, call stacks of blocks that are still allocated stay, as in PyTorch. Then each
// free checks for a call stack to drop, until none is left.
//
// Locks: lowtide calls `observe` under its own locks, so code that holds `events_` must not call lowtide. `control_` is
// taken before lowtide's locks; it serializes `record` and `attach`.
class History {
 public:
  // The call stack of this thread's events during its lifetime. It also keeps the first exception of a tracker, because
  // exceptions cannot pass through lowtide. Gather the context before any lock: that may need Python's lock.
  class Cause {
   public:
    explicit Cause(Context context) : context_(std::move(context)), outer_(current_) {
      current_ = this;
    }
    ~Cause() {
      current_ = outer_;
    }
    Cause(const Cause&) = delete;
    Cause& operator=(const Cause&) = delete;

    // Returns the current context; null if none was gathered.
    static Context current() {
      return current_ == nullptr ? nullptr : current_->context_;
    }

    // Keeps the exception that is being handled, if it is the first.
    static void keep_exception() noexcept {
      if (current_ != nullptr && current_->thrown_ == nullptr) {
        current_->thrown_ = std::current_exception();
      }
    }

    bool has_thrown() const {
      return thrown_ != nullptr;
    }

    // Throws the kept exception to the caller of PyTorch's allocator. Call it once lowtide has returned.
    void rethrow() const {
      if (C10_UNLIKELY(has_thrown())) {
        std::rethrow_exception(thrown_);
      }
    }

   private:
    static inline thread_local Cause* current_ = nullptr;
    Context context_;
    std::exception_ptr thrown_;
    Cause* outer_;
  };

  // Returns whether lowtide notifies this of events.
  bool is_watching() const {
    return is_watching_.load(std::memory_order_relaxed);
  }

  bool is_recording() const {
    return is_recording_.load(std::memory_order_relaxed);
  }

  // Returns whether frees may concern this: events are observed, or contexts are left from when they were.
  bool follows_frees() const {
    return follows_frees_.load(std::memory_order_relaxed);
  }

  // Drops the context of a block that is about to be freed, if no event will report the free.
  void forget(const void* memory) {
    const auto address = reinterpret_cast<uint64_t>(memory);
    if (is_watching() || !follows_frees() || !left_.may_contain(address)) {
      return;
    }
    const std::lock_guard<std::mutex> lock(events_);
    for (auto& [index, device] : devices_) {
      device.blocks.erase(address);
    }
    update_follows_frees();
  }

  // Returns a context from the recorder if contexts of this level are recorded, else null.
  Context gather(RecordContext level) const {
    if (when_.load(std::memory_order_relaxed) < level) {
      return nullptr;
    }
    const auto recorder = recorder_.load(std::memory_order_relaxed);
    return recorder == nullptr ? nullptr : recorder();
  }

  void record(
      bool enabled,
      CreateContextFn recorder,
      size_t max_entries,
      RecordContext when,
      bool clear,
      const std::vector<std::string>& skip_actions) {
    TORCH_CHECK(when == RecordContext::NEVER || recorder != nullptr, "a context is asked for, and no recorder given");
    const auto skipped = parse(skip_actions);
    const std::lock_guard<std::mutex> control(control_);
    {
      const std::lock_guard<std::mutex> lock(events_);
      max_entries_ = std::max<size_t>(max_entries, 1);
      skipped_ = skipped;
      if (!enabled || clear) {
        annotations_.clear();
        for (auto& [index, device] : devices_) {
          device.trace.clear();
        }
      }
    }
    when_ = enabled ? when : RecordContext::NEVER;
    recorder_ = enabled ? recorder : nullptr;
    is_recording_ = enabled;
    watch();
  }

  void attach(AllocatorTraceTracker tracker) {
    const std::lock_guard<std::mutex> control(control_);
    {
      const std::lock_guard<std::mutex> lock(events_);
      trackers_.push_back(std::move(tracker));
    }
    has_trackers_ = true;
    watch();
  }

  // Records an event of PyTorch's own: a snapshot, or an annotation of a block.
  void note(
      TraceEntry::Action action,
      DeviceIndex device,
      uint64_t address,
      size_t size,
      cudaStream_t stream,
      const MempoolId_t& pool,
      Context context,
      const std::string& user_metadata) {
    if (is_watching()) {
      const std::lock_guard<std::mutex> lock(events_);
      const auto entry = make_entry(action, device, address, size, stream, pool, std::move(context), user_metadata);
      notify(entry);
      keep(entry);
    }
  }

  // Records the beginning or end of a record_function range.
  void annotate(DeviceIndex device, const std::vector<std::pair<std::string, std::string>>& metadata) {
    if (!is_recording()) {
      return;
    }
    AnnotationEntry entry(device, c10::getApproximateTime());
    for (const auto& [name, value] : metadata) {
      entry.recordUserMetadata(name, value);
    }
    const std::lock_guard<std::mutex> lock(events_);
    push(annotations_, std::move(entry));
  }

  // Returns the context of the block at an address; null if unknown.
  Context block_context(DeviceIndex device, uint64_t address) {
    const std::lock_guard<std::mutex> lock(events_);
    const auto& blocks = devices_[device].blocks;
    const auto found = blocks.find(address);
    return found == blocks.end() ? nullptr : found->second;
  }

  // Returns the context in which a segment, or the first mapped part of it, was allocated.
  Context segment_context(DeviceIndex device, uint64_t address, uint64_t size) {
    const std::lock_guard<std::mutex> lock(events_);
    return devices_[device].first_segment_context(address, size);
  }

  // Returns a device's entries, oldest first, with times in microseconds since the epoch.
  std::vector<TraceEntry> trace(DeviceIndex device) {
    const std::lock_guard<std::mutex> lock(events_);
    return in_microseconds(devices_[device].trace);
  }

  // Returns the record_function ranges, oldest first, with the same times.
  std::vector<AnnotationEntry> annotations() {
    const std::lock_guard<std::mutex> lock(events_);
    return in_microseconds(annotations_);
  }

  // The compiler's contexts and the user's metadata of this thread.
  static inline thread_local std::vector<std::string> compile_contexts;
  static inline thread_local std::string user_metadata;

 private:
  struct PerDevice {
    std::deque<TraceEntry> trace;
    // The contexts of allocated blocks, by address.
    std::unordered_map<uint64_t, Context> blocks;
    std::map<uint64_t, Context> segments;
    // Paused segments. Trackers were notified that they are freed.
    std::set<uint64_t> paused;

    Context first_segment_context(uint64_t address, uint64_t size) const {
      const auto first = segments.lower_bound(address);
      return first == segments.end() || first->first >= address + size ? nullptr : first->second;
    }

    // Updates the contexts, and returns the event's context: its cause's, or its block's or segment's if there is no
    // cause.
    Context track(const lowtide_event& event, Context cause) {
      switch (event.action) {
        case LOWTIDE_ACTION_ALLOC:
          keep(blocks, event.address, cause);
          return cause;
        case LOWTIDE_ACTION_FREE_REQUESTED:
        case LOWTIDE_ACTION_FREE_COMPLETED: {
          const auto block = blocks.find(event.address);
          if (cause == nullptr && block != blocks.end()) {
            cause = block->second;
          }
          if (event.action == LOWTIDE_ACTION_FREE_COMPLETED && block != blocks.end()) {
            blocks.erase(block);
          }
          return cause;
        }
        case LOWTIDE_ACTION_SEGMENT_ALLOC:
        case LOWTIDE_ACTION_SEGMENT_MAP:
          keep(segments, event.address, cause);
          return cause;
        case LOWTIDE_ACTION_SEGMENT_FREE:
        case LOWTIDE_ACTION_SEGMENT_UNMAP:
          if (cause == nullptr) {
            cause = first_segment_context(event.address, event.size);
          }
          segments.erase(segments.lower_bound(event.address), segments.lower_bound(event.address + event.size));
          return cause;
        default:
          return cause;
      }
    }

    template <typename Map>
    static void keep(Map& map, uint64_t address, const Context& context) {
      if (context == nullptr) {
        map.erase(address);
      } else {
        map[address] = context;
      }
    }
  };

  static std::set<TraceEntry::Action> parse(const std::vector<std::string>& actions) {
    std::set<TraceEntry::Action> parsed;
#if LOWTIDE_TORCH_AT_LEAST(11)
    for (const auto& action : actions) {
      parsed.insert(entries::parseTraceEntryAction(action));
    }
#else
    TORCH_CHECK(actions.empty(), "this PyTorch cannot skip actions");
#endif
    return parsed;
  }

  // Observes lowtide's events while history is recorded or a tracker is attached. `control_` is held.
  void watch() {
    const bool is_wanted = is_recording_ || has_trackers_;
    if (!is_wanted) {
      // This comes before the first free without an event.
      note_left();
    }
    is_watching_ = is_wanted;
    check(lowtide_observe_events(is_watching_ ? &History::observe : nullptr, this));
    if (is_watching_) {
      left_.clear();
      // Segments that were paused before: trackers are not notified of their end either.
      for (DeviceIndex index = 0; index < device_count; ++index) {
        visit_segments(index, [&](const lowtide_segment& segment, const lowtide_block*, size_t) {
          if (segment.is_paused) {
            const std::lock_guard<std::mutex> lock(events_);
            devices_[index].paused.insert(segment.address);
          }
        });
      }
    } else {
      keep_held();
    }
    const std::lock_guard<std::mutex> lock(events_);
    update_follows_frees();
  }

  // Keeps the contexts of allocated blocks only: other addresses may be reused without an event.
  // `control_` is held.
  void keep_held() {
    note_left();
    for (DeviceIndex index = 0; index < device_count; ++index) {
      std::unordered_set<uint64_t> held;
      visit_segments(index, [&](const lowtide_segment&, const lowtide_block* blocks, size_t count) {
        for (size_t number = 0; number < count; ++number) {
          if (blocks[number].state == LOWTIDE_BLOCK_STATE_ALLOCATED) {
            held.insert(blocks[number].address);
          }
        }
      });
      const std::lock_guard<std::mutex> lock(events_);
      PerDevice& device = devices_[index];
      for (auto block = device.blocks.begin(); block != device.blocks.end();) {
        block = held.count(block->first) == 0 ? device.blocks.erase(block) : std::next(block);
      }
      device.segments.clear();
      device.paused.clear();
    }
  }

  // Adds all blocks with a context to the filter that frees check.
  void note_left() {
    const std::lock_guard<std::mutex> lock(events_);
    for (const auto& [index, device] : devices_) {
      for (const auto& [address, context] : device.blocks) {
        left_.insert(address);
      }
    }
  }

  // Updates whether frees are checked. `events_` is held.
  void update_follows_frees() {
    bool has_contexts = false;
    for (const auto& [index, device] : devices_) {
      has_contexts |= !device.blocks.empty();
    }
    follows_frees_ = is_watching_ || has_contexts;
  }

  static void observe(void* self, const lowtide_event* event) noexcept {
    try {
      static_cast<History*>(self)->on_event(*event);
    } catch (...) {
      // A tracker threw, or host memory ran out. Without a `Cause`, only the entry is lost.
      Cause::keep_exception();
    }
  }

  void on_event(const lowtide_event& event) {
    static_assert(static_cast<int>(TraceEntry::ALLOC) == LOWTIDE_ACTION_ALLOC);
    static_assert(static_cast<int>(TraceEntry::SEGMENT_UNMAP) == LOWTIDE_ACTION_SEGMENT_UNMAP);
    static_assert(static_cast<int>(TraceEntry::OOM) == LOWTIDE_ACTION_OUT_OF_MEMORY);
    const std::lock_guard<std::mutex> lock(events_);
    auto& device = devices_[static_cast<DeviceIndex>(event.device)];
    switch (event.action) {
      // Trackers register memory with NCCL, and must do so again after a resume. The history keeps the segment, as
      // statistics and snapshots do.
      case LOWTIDE_ACTION_SEGMENT_PAUSED:
        device.paused.insert(event.address);
        notify(make_entry(TraceEntry::SEGMENT_FREE, event, nullptr));
        return;
      case LOWTIDE_ACTION_SEGMENT_RESUMED:
        device.paused.erase(event.address);
        notify(make_entry(TraceEntry::SEGMENT_ALLOC, event, nullptr));
        return;
      default: {
        const auto action = static_cast<TraceEntry::Action>(event.action);
        const auto entry = make_entry(action, event, device.track(event, Cause::current()));
        if (action != TraceEntry::SEGMENT_FREE || device.paused.erase(event.address) == 0) {
          notify(entry);
        }
        keep(entry);
      }
    }
  }

  TraceEntry make_entry(TraceEntry::Action action, const lowtide_event& event, Context context) const {
    return make_entry(
        action,
        static_cast<DeviceIndex>(event.device),
        event.address,
        event.size,
        static_cast<cudaStream_t>(event.stream),
        to_torch(event.pool),
        std::move(context),
        user_metadata);
  }

  TraceEntry make_entry(
      TraceEntry::Action action,
      DeviceIndex device,
      uint64_t address,
      size_t size,
      cudaStream_t stream,
      const MempoolId_t& pool,
      Context context,
      [[maybe_unused]] const std::string& metadata) const {
    return TraceEntry(
        action,
        device,
        address,
        size,
        stream,
        pool,
        c10::getApproximateTime(),
        when_ >= RecordContext::ALLOC ? std::move(context) : nullptr,
        compile_contexts.empty() ? "N/A" : compile_contexts.back()
#if LOWTIDE_TORCH_AT_LEAST(10)
            ,
        metadata
#endif
    );
  }

  // Notifies the trackers. `events_` is held.
  void notify(const TraceEntry& entry) {
    for (const auto& tracker : trackers_) {
      tracker(entry);
    }
  }

  // Keeps the entry if history is recorded. `events_` is held.
  void keep(const TraceEntry& entry) {
    if (is_recording() && skipped_.count(entry.action_) == 0) {
      push(devices_[entry.device_].trace, entry);
    }
  }

  template <typename Entry>
  void push(std::deque<Entry>& entries, Entry entry) {
    entries.push_back(std::move(entry));
    while (entries.size() > max_entries_) {
      entries.pop_front();
    }
  }

  template <typename Entry>
  std::vector<Entry> in_microseconds(const std::deque<Entry>& entries) {
    std::vector<Entry> converted(entries.begin(), entries.end());
    const auto to_nanoseconds = clock_.makeConverter();
    for (Entry& entry : converted) {
      entry.time_.t_ = to_nanoseconds(entry.time_.approx_t_) / 1000;
    }
    return converted;
  }

  std::mutex control_;
  bool has_trackers_ = false;  // Guarded by `control_`.

  std::atomic<bool> is_watching_{false};
  std::atomic<bool> is_recording_{false};
  std::atomic<bool> follows_frees_{false};
  // The blocks whose contexts were left when observing ended.
  AddressFilter left_;
  std::atomic<RecordContext> when_{RecordContext::NEVER};
  std::atomic<CreateContextFn> recorder_{nullptr};

  // Guards the members below.
  std::mutex events_;
  size_t max_entries_ = 1;
  std::set<TraceEntry::Action> skipped_;
  std::vector<AllocatorTraceTracker> trackers_;
  std::map<DeviceIndex, PerDevice> devices_;
  std::deque<AnnotationEntry> annotations_;
  c10::ApproximateClockToUnixTimeConverter clock_;
};

}  // namespace lowtide
