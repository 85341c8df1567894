"""The shim in a PyTorch that sees no GPU: what of it needs no CUDA, on the stand-in driver.

They need the real PyTorch, and are skipped without. What needs a GPU is in `gpu`.
"""

import pytest
from machine import Machine
from shim import INSTALLED, SHIM, compiled

pytest.importorskip("torch")


def test_a_forked_child_lets_go_of_the_pools_that_it_inherits(gpu: Machine) -> None:
    # The destructor of a graph does this, in which an exception ends the process.
    printed = gpu.code(
        SHIM,
        """
        child = os.fork()
        if child == 0:
            try:
                torch._C._cuda_releasePool(0, (0, 1))
            except RuntimeError as error:
                print(error, flush=True)
                os._exit(1)
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        torch._C._cuda_releasePool(0, (0, 1))
        try:
            torch._C._cuda_releasePool(0, (0, 1))
        except RuntimeError:
            print("the parent is told")
        """,
    )
    assert printed == "0\nthe parent is told\n"


def test_settings_may_name_the_backend_of_pytorch(gpu: Machine) -> None:
    # PyTorch reads the environment late, and ends in an error where it names another backend than the allocator does.
    printed = gpu.code(
        SHIM,
        """
        names = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")
        change = next(filter(None, (getattr(torch._C, name, None) for name in names)))
        change("backend:native,max_split_size_mb:128")
        print(torch.cuda.get_allocator_backend())
        """,
        PYTORCH_CUDA_ALLOC_CONF="backend:native",
    )
    assert printed == "native\n"


# Throws when memory is given back, and calls the deleter of tensors.
TRACKER = """
    #include <c10/cuda/CUDACachingAllocator.h>
    #include <stdexcept>

    namespace caching = c10::cuda::CUDACachingAllocator;

    extern "C" void attach() {
      caching::attachAllocatorTraceTracker([](const caching::TraceEntry& entry) {
        if (entry.action_ == caching::TraceEntry::FREE_REQUESTED) {
          throw std::runtime_error("the tracker objects");
        }
      });
    }

    extern "C" void free_block(void* memory) {
      caching::get()->raw_deleter()(memory);
    }
"""


def test_what_a_tracker_throws_reaches_the_caller_who_gave_memory_back(gpu: Machine) -> None:
    printed = gpu.code(
        SHIM,
        compiled("tracker", TRACKER),
        """

        raised, warned = allocate(1000), allocate(1000)
        tracker.attach()
        try:
            torch._C._cuda_cudaCachingAllocator_raw_delete(raised.value)
        except RuntimeError as error:
            print(error)
        print("warns:", flush=True)
        sys.stderr = sys.stdout
        os.dup2(1, 2)
        tracker.free_block(warned)
        print({allocate(1000).value, allocate(1000).value} == {raised.value, warned.value})
        """,
    )
    assert "the tracker objects\nwarns:\n" in printed
    assert "the tracker objects" in printed.split("warns:")[1], printed
    assert printed.endswith("True\n"), "the blocks are free all the same"


# Counts what NCCL's registrations go by, and what it is told twice of.
REGISTRATIONS = """
    #include <c10/cuda/CUDACachingAllocator.h>
    #include <map>

    namespace caching = c10::cuda::CUDACachingAllocator;

    static std::map<uint64_t, int> registered;
    static int wrongs = 0;

    extern "C" void attach() {
      caching::attachAllocatorTraceTracker([](const caching::TraceEntry& entry) {
        if (entry.action_ == caching::TraceEntry::SEGMENT_ALLOC) {
          wrongs += ++registered[entry.addr_] != 1;
        } else if (entry.action_ == caching::TraceEntry::SEGMENT_FREE) {
          wrongs += --registered[entry.addr_] != 0;
          registered.erase(entry.addr_);
        }
      });
    }

    extern "C" int registered_count() {
      return registered.size();
    }

    extern "C" int wrong_count() {
      return wrongs;
    }
"""


def test_trackers_register_what_is_resumed_anew(gpu: Machine) -> None:
    printed = gpu.code(
        SHIM,
        INSTALLED,
        compiled("registrations", REGISTRATIONS),
        """

        registrations.attach()
        outside = allocate(30 << 20)
        with lowtide.region("kv", backup="host"):
            kept, freed = allocate(30 << 20), allocate(30 << 20)
        print(registrations.registered_count())
        lowtide.pause("kv")
        print(registrations.registered_count())
        check(library().lowtide_deallocate(freed))
        lowtide.resume("kv")
        print(registrations.registered_count())
        for memory in kept, outside:
            check(library().lowtide_deallocate(memory))
        check(library().lowtide_empty_cache(-1))
        print(registrations.registered_count(), registrations.wrong_count())
        """,
        # NCCL registers no memory of tide's outside of regions.
        LOWTIDE_STRATEGY="caching",
    )
    assert printed == "3\n1\n2\n0 0\n"


# Does what ProcessGroupNCCL does to register a pool: its segments as a snapshot lists them, and from then on those that
# come and go. What is not there, or twice, is an error to NCCL.
POOL_REGISTRATIONS = """
    #include <c10/cuda/CUDACachingAllocator.h>
    #include <set>

    namespace caching = c10::cuda::CUDACachingAllocator;

    static std::set<uint64_t> registered;
    static int wrongs = 0;
    static bool follows = false;

    static auto segments(unsigned long first, unsigned long second) {
      return caching::get()->snapshot({first, second}).segments;
    }

    extern "C" void register_pool(unsigned long first, unsigned long second) {
      caching::get()->init(1);
      if (!follows) {
        caching::attachAllocatorTraceTracker([](const caching::TraceEntry& entry) {
          if (!follows) {
            return;
          } else if (entry.action_ == caching::TraceEntry::SEGMENT_ALLOC) {
            wrongs += !registered.insert(entry.addr_).second;
          } else if (entry.action_ == caching::TraceEntry::SEGMENT_FREE) {
            wrongs += registered.erase(entry.addr_) != 1;
          }
        });
        follows = true;
      }
      for (const auto& segment : segments(first, second)) {
        wrongs += !registered.insert(segment.address).second;
      }
    }

    extern "C" void deregister_pool(unsigned long first, unsigned long second) {
      for (const auto& segment : segments(first, second)) {
        wrongs += registered.erase(segment.address) != 1;
      }
      follows = false;
    }

    extern "C" int registered_count() {
      return registered.size();
    }

    extern "C" int wrong_count() {
      return wrongs;
    }

    extern "C" int segment_count() {
      return segments(0, 0).size();
    }
"""


def test_a_pool_that_is_registered_while_it_is_paused_is_so_at_the_resume(gpu: Machine) -> None:
    printed = gpu.code(
        SHIM,
        INSTALLED,
        compiled("nccl", POOL_REGISTRATIONS),
        """

        # The region's own pool is a pool like others.
        with lowtide.region("kv", backup="host"):
            kept, freed, freed_later = allocate(30 << 20), allocate(30 << 20), allocate(30 << 20)
        pool = ctypes.c_ulong(1), ctypes.c_ulong(1)
        lowtide.pause("kv")
        nccl.register_pool(*pool)
        print(nccl.registered_count(), nccl.segment_count())
        check(library().lowtide_deallocate(freed))
        lowtide.resume("kv")
        print(nccl.registered_count())
        lowtide.pause("kv")
        print(nccl.registered_count())
        lowtide.resume("kv")
        lowtide.pause("kv")
        nccl.deregister_pool(*pool)
        print(nccl.registered_count(), nccl.segment_count(), nccl.wrong_count())
        """,
    )
    assert printed == "0 3\n2\n0\n0 2 0\n"


# Holds memory until a request finds none, and throws instead if it is told to.
SPARE = """
    #include <c10/cuda/CUDACachingAllocator.h>
    #include <stdexcept>

    namespace caching = c10::cuda::CUDACachingAllocator;

    static void* held = nullptr;
    static bool throws_next = false;

    class Spare : public c10::FreeMemoryCallback {
     public:
      bool Execute() override {
        if (throws_next) {
          throws_next = false;
          throw std::runtime_error("the callback objects");
        }
        if (held == nullptr) {
          return false;
        }
        caching::raw_delete(held);
        held = nullptr;
        return true;
      }
    };

    namespace c10 {
    REGISTER_FREE_MEMORY_CALLBACK("spare", Spare)
    }

    extern "C" void hold(size_t size) {
      // With one device, no request asks CUDA's runtime for the current one.
      caching::get()->init(1);
      held = caching::get()->raw_alloc_with_stream(size, nullptr);
    }

    extern "C" void throw_next() {
      throws_next = true;
    }
"""

# Of two requests of 200 MiB, one fits.
SHORT = """
    def request():
        torch._C._cuda_cudaCachingAllocator_raw_alloc(200 << 20, 0)

    torch._C._cuda_setMemoryFraction(0.25, 0)
    spare.hold(ctypes.c_size_t(200 << 20))
"""


def test_what_a_registered_callback_frees_serves_the_request(gpu: Machine) -> None:
    printed = gpu.code(
        SHIM,
        compiled("spare", SPARE),
        SHORT,
        """

        request()
        print("served")
        try:
            request()
        except torch.OutOfMemoryError as error:
            print(str(error).partition(". ")[0])
        """,
        FAKECUDA_CAPACITY=str(1 << 30),
    )
    assert printed == "served\nCUDA out of memory\n"


def test_a_request_whose_callback_throws_runs_out_of_memory(gpu: Machine) -> None:
    printed = gpu.code(
        SHIM,
        compiled("spare", SPARE),
        SHORT,
        """

        spare.throw_next()
        try:
            request()
        except torch.OutOfMemoryError as error:
            print(str(error).partition(". ")[0])
        request()
        print("served")
        """,
        FAKECUDA_CAPACITY=str(1 << 30),
    )
    assert printed == "CUDA out of memory\nserved\n"
