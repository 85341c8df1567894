// What torch.cuda.memory._record_memory_history asks for: who allocated what is held, and what has happened.
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

// How many devices PyTorch has found; 0 until it starts CUDA.
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

// Addresses, and some that were not put in: what a thread looks at before it takes a lock.
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
  // 32 KiB: of the addresses of others, one in 27 is taken for one of 10,000.
  static constexpr unsigned int kBitsLog2 = 18;

  static std::pair<size_t, uint64_t> place(uint64_t address) {
    const uint64_t hash = (address * 0x9e3779b97f4a7c15) >> (64 - kBitsLog2);
    return {hash / 64, uint64_t{1} << (hash % 64)};
  }

  std::array<std::atomic<uint64_t>, (size_t{1} << kBitsLog2) / 64> words_{};
};

// lowtide tells its events to this while history is recorded or somebody tracks them, and never else: a program
// that asks for neither pays nothing. Once neither is so any more, those who allocated what is still held stay known,
// as they do to PyTorch, and each free is looked at until nothing of that is left.
//
// Locks. lowtide calls `observe` under its own locks, so what holds `events_` here must not call lowtide.
// `control_`, which is taken before lowtide's locks, keeps those apart who turn the recording on and off.
class History {
 public:
  // Says, for its lifetime, on whose behalf events happen in this thread, and keeps what a tracker threw meanwhile:
  // lowtide cannot be thrown through. A context is gathered before any lock is taken, since that may need Python's.
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

    // Null where nothing was gathered.
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

    // Throws what was kept, once lowtide has returned: whoever called PyTorch's allocator is to have it.
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

  // Whether events are told at all.
  bool is_watching() const {
    return is_watching_.load(std::memory_order_relaxed);
  }

  bool is_recording() const {
    return is_recording_.load(std::memory_order_relaxed);
  }

  // Whether what is given back may concern this: while events are told, or contexts are left from when they were.
  bool follows_frees() const {
    return follows_frees_.load(std::memory_order_relaxed);
  }

  // Drops who allocated a block that is about to be given back, if no event will tell of that.
  void forget(const void* memory) {
    const auto address = reinterpret_cast<uint64_t>(memory);
    if (is_watching() || !follows_frees() || !left_.may_contain(address)) {
      return;
    }
    const std::lock_guard<std::mutex> lock(events_);
    for (auto& [index, device] : devices_) {
      device.blocks.erase(address);
    }
    settle_frees();
  }

  // Calls the recorder where contexts are wanted of what `level` names; null elsewhere.
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

  // Notes what PyTorch itself does, not lowtide: a picture taken, a text put to a block.
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
      tell(entry);
      keep(entry);
    }
  }

  // Notes the beginning or end of a range of record_function.
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

  // Who allocated the block at an address; null if that is not known.
  Context block_context(DeviceIndex device, uint64_t address) {
    const std::lock_guard<std::mutex> lock(events_);
    const auto& blocks = devices_[device].blocks;
    const auto found = blocks.find(address);
    return found == blocks.end() ? nullptr : found->second;
  }

  // On whose behalf a segment, or the first part of it that was mapped, came from the driver.
  Context segment_context(DeviceIndex device, uint64_t address, uint64_t size) {
    const std::lock_guard<std::mutex> lock(events_);
    return devices_[device].first_segment_context(address, size);
  }

  // The entries of a device, oldest first, with times in microseconds since the epoch.
  std::vector<TraceEntry> trace(DeviceIndex device) {
    const std::lock_guard<std::mutex> lock(events_);
    return in_microseconds(devices_[device].trace);
  }

  // The ranges of record_function, likewise.
  std::vector<AnnotationEntry> annotations() {
    const std::lock_guard<std::mutex> lock(events_);
    return in_microseconds(annotations_);
  }

  // What the compiler says it is at, and what the user says of what is allocated; by thread.
  static inline thread_local std::vector<std::string> compile_contexts;
  static inline thread_local std::string user_metadata;

 private:
  struct PerDevice {
    std::deque<TraceEntry> trace;
    // By address, of what is held and was allocated while contexts were gathered.
    std::unordered_map<uint64_t, Context> blocks;
    std::map<uint64_t, Context> segments;
    // Segments whose memory is away. Trackers were told that they are gone.
    std::set<uint64_t> paused;

    Context first_segment_context(uint64_t address, uint64_t size) const {
      const auto first = segments.lower_bound(address);
      return first == segments.end() || first->first >= address + size ? nullptr : first->second;
    }

    // Keeps the books of contexts, and returns the one that goes with the event: that of the call that caused it,
    // or that of what it is about.
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

  // Has lowtide tell events while anybody wants them. `control_` is held.
  void watch() {
    const bool is_wanted = is_recording_ || has_trackers_;
    if (!is_wanted) {
      // Before the first free that no event tells of.
      note_left();
    }
    is_watching_ = is_wanted;
    check(lowtide_observe_events(is_watching_ ? &History::observe : nullptr, this));
    if (is_watching_) {
      left_.clear();
      // What was paused before anybody watched: trackers do not hear of its end either.
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
    settle_frees();
  }

  // Keeps the contexts of what the program holds, and nothing else: addresses will be given to others unseen.
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

  // Has frees look at the contexts that there are.
  void note_left() {
    const std::lock_guard<std::mutex> lock(events_);
    for (const auto& [index, device] : devices_) {
      for (const auto& [address, context] : device.blocks) {
        left_.insert(address);
      }
    }
  }

  // Says whether frees are still looked at. `events_` is held.
  void settle_frees() {
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
      // A tracker threw, or memory of the host ran out. Where nobody waits for the outcome only the entry is lost.
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
      // Trackers register memory with NCCL, and have to do so anew. In the history the segment stays, as it does
      // in every figure and in the picture at the history's end.
      case LOWTIDE_ACTION_SEGMENT_PAUSED:
        device.paused.insert(event.address);
        tell(make_entry(TraceEntry::SEGMENT_FREE, event, nullptr));
        return;
      case LOWTIDE_ACTION_SEGMENT_RESUMED:
        device.paused.erase(event.address);
        tell(make_entry(TraceEntry::SEGMENT_ALLOC, event, nullptr));
        return;
      default: {
        const auto action = static_cast<TraceEntry::Action>(event.action);
        const auto entry = make_entry(action, event, device.track(event, Cause::current()));
        if (action != TraceEntry::SEGMENT_FREE || device.paused.erase(event.address) == 0) {
          tell(entry);
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

  // Tells the trackers. `events_` is held.
  void tell(const TraceEntry& entry) {
    for (const auto& tracker : trackers_) {
      tracker(entry);
    }
  }

  // Keeps the entry if history is on. `events_` is held.
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
  // The blocks whose contexts were left when nobody wanted events any more.
  AddressFilter left_;
  std::atomic<RecordContext> when_{RecordContext::NEVER};
  std::atomic<CreateContextFn> recorder_{nullptr};

  // Guards what follows.
  std::mutex events_;
  size_t max_entries_ = 1;
  std::set<TraceEntry::Action> skipped_;
  std::vector<AllocatorTraceTracker> trackers_;
  std::map<DeviceIndex, PerDevice> devices_;
  std::deque<AnnotationEntry> annotations_;
  c10::ApproximateClockToUnixTimeConverter clock_;
};

}  // namespace lowtide
