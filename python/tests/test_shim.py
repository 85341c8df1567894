"""The shim in a PyTorch that sees no GPU: what of it needs no CUDA, on the stand-in driver.

They need the real PyTorch, and are skipped without. What needs a GPU is in `gpu`.
"""

from pathlib import Path
from textwrap import dedent

import pytest
from machine import Machine

pytest.importorskip("torch")

SHIM = """
    import os, torch
    from lowtide._library import Mempool, check, library
    from lowtide.torch.install import install_shim
    install_shim()
    library().lowtide_retain_pool.argtypes = [__import__("ctypes").c_int, Mempool]
    check(library().lowtide_retain_pool(0, Mempool(0, 1)))
"""


# As `lowtide.install` leaves it, for what asks whether it was called.
INSTALLED = """
    import lowtide, lowtide._install
    lowtide._install._is_installed, lowtide._install._shim = True, install_shim()
"""


def compiled(name: str, source: str) -> str:
    """Returns lines that compile C++ as the shim is compiled and load it as `name`, and `allocate`."""
    return f"""
        import ctypes, subprocess, sys
        from pathlib import Path
        from lowtide.torch import build
        source = Path("{name}.cpp")
        source.write_text({dedent(source)!r})
        arguments, _ = build._plan()
        arguments = [source if argument.endswith("shim.cpp") else argument for argument in arguments]
        subprocess.run(
            [*build.compiler(), *arguments, "-fvisibility=default", "-o", "{name}.so"], check=True
        )
        {name} = ctypes.CDLL("./{name}.so")

        def allocate(size):
            memory = ctypes.c_void_p()
            check(library().lowtide_allocate(
                ctypes.c_size_t(size), 0, ctypes.c_void_p(), ctypes.byref(memory)))
            return memory
    """


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

    extern "C" void give_back(void* memory) {
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
        tracker.give_back(warned)
        print(allocate(1000).value == raised.value)
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
        check(library().lowtide_reset())
        print(registrations.registered_count(), registrations.wrong_count())
        """,
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


# Puts memory where PyTorch keeps it for cuBLAS. `{declarations}` is what PyTorch's own header says of the place, which
# takes more of CUDA's headers than are there.
WORKSPACES = """
    #include <c10/cuda/CUDACachingAllocator.h>

    #include <map>
    #include <shared_mutex>

    namespace at::cuda {
    {declarations}
    }

    namespace caching = c10::cuda::CUDACachingAllocator;

    extern "C" void keep(void* handle, void* memory, bool is_lt) {
      auto& kept = is_lt ? at::cuda::cublaslt_handle_stream_to_workspace()
                         : at::cuda::cublas_handle_stream_to_workspace();
      const std::tuple<void*, void*> key(handle, nullptr);
      kept.map.emplace(key, at::DataPtr(memory, memory, caching::get()->raw_deleter(), at::Device("cuda:0")));
    }

    extern "C" size_t count() {
      return at::cuda::cublas_handle_stream_to_workspace().map.size() +
          at::cuda::cublaslt_handle_stream_to_workspace().map.size();
    }
"""


def declarations_of_workspaces() -> str:
    import torch

    header = Path(torch.__file__).parent / "include" / "ATen" / "cuda" / "CUDAContextLight.h"
    text = header.read_text()
    first, last = "struct WorkspaceMapWithMutex", "cublaslt_handle_stream_to_workspace();"
    if first not in text:
        pytest.skip("an older PyTorch shows nobody what it keeps")
    return text[text.index(first) : text.index(last) + len(last)]


def test_what_pytorch_keeps_for_cublas_in_a_region_is_let_go_of(gpu: Machine) -> None:
    program = dedent(WORKSPACES).replace("{declarations}", declarations_of_workspaces())
    printed = gpu.code(
        SHIM,
        INSTALLED,
        compiled("workspaces", program),
        """
        workspaces.keep.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_bool]

        def keep(handle, is_lt=False):
            workspaces.keep(handle, allocate(1000), is_lt)

        with lowtide.region("a"):
            keep(1), keep(2, is_lt=True)
        with lowtide.region("b"):
            keep(3)
        keep(4)
        print(workspaces.count())
        lowtide.pause("a")
        print(workspaces.count())
        lowtide.resume()
        lowtide.pause()
        print(workspaces.count(), [seen["live_bytes"] for seen in lowtide.regions()])
        """,
    )
    assert printed == "4\n2\n1 [0, 0]\n"


# The shim's own part of it, with which a graph is captured without CUDA.
ASIDE = """
    #include "{sources}/pools.h"

    #include <c10/cuda/CUDACachingAllocator.h>

    namespace caching = c10::cuda::CUDACachingAllocator;

    static void insert(at::cuda::Workspaces& kept, void* handle, void* memory) {{
      const std::tuple<void*, void*> key(handle, nullptr);
      at::DataPtr data(memory, memory, caching::get()->raw_deleter(), at::Device("cuda:0"));
    #if LOWTIDE_TORCH_AT_LEAST(13)
      kept.emplace(key, std::pair(std::move(data), size_t(1000)));
    #else
      kept.emplace(key, std::move(data));
    #endif
    }}

    extern "C" void keep(void* handle, void* memory) {{
      insert(at::cuda::cublas_handle_stream_to_workspace().map, handle, memory);
    }}

    extern "C" void keep_lt(void* handle, void* memory) {{
      insert(at::cuda::cublaslt_handle_stream_to_workspace().map, handle, memory);
    }}

    extern "C" size_t count() {{
      return at::cuda::cublas_handle_stream_to_workspace().map.size();
    }}

    extern "C" size_t count_lt() {{
      return at::cuda::cublaslt_handle_stream_to_workspace().map.size();
    }}

    extern "C" void clear() {{
      at::cuda::cublas_handle_stream_to_workspace().map.clear();
      at::cuda::cublaslt_handle_stream_to_workspace().map.clear();
    }}

    extern "C" void capture() {{
      lowtide::begin_capture(0);
      lowtide::check(lowtide_capture_end(0));
    }}

    extern "C" void lowtide_torch_begin_pause(const char* tag) {{
      lowtide::WorkspacesAside::instance().begin_pause(tag);
    }}

    extern "C" void lowtide_torch_end_pause(const char* tag) {{
      lowtide::WorkspacesAside::instance().end_pause(tag);
    }}

    extern "C" void lowtide_torch_end_resume() {{
      lowtide::WorkspacesAside::instance().settle();
    }}
"""


def aside() -> str:
    """Returns lines that put that in the shim's place, and a graph was captured."""
    from lowtide.torch import build

    # As it is known there.
    declarations_of_workspaces()
    return dedent(compiled("aside", dedent(ASIDE).format(sources=build.SOURCES))) + dedent("""
        shim, lowtide._install._shim = lowtide._install._shim, aside
        aside.lowtide_torch_is_installed = shim.lowtide_torch_is_installed
        aside.keep.argtypes = aside.keep_lt.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        aside.lowtide_torch_begin_pause.argtypes = aside.lowtide_torch_end_pause.argtypes = [ctypes.c_char_p]
        aside.capture()

        def keep(handle, tag=None, insert=aside.keep):
            with lowtide.region(tag) if tag else lowtide.disable():
                insert(handle, allocate(1000))

        def show():
            print(aside.count(), *(seen["live_bytes"] for seen in lowtide.regions()))
    """)


def test_what_a_graph_may_use_for_cublas_comes_back_with_its_region(gpu: Machine) -> None:
    printed = gpu.code(
        SHIM,
        INSTALLED,
        aside(),
        """
        keep(1, "a"), keep(2, "a"), keep(3, "b")
        for tag in ("a", "b", None):
            lowtide.pause(tag)
            show()
            lowtide.resume(tag)
            show()
        lowtide.pause("a")
        keep(2)
        lowtide.pause("b")
        lowtide.resume("b")
        show()
        # PyTorch has another of one by now, which a graph may use still.
        lowtide.resume("a")
        show()
        lowtide.pause()
        show()
        lowtide.resume()
        show()
        # Those that came back are what PyTorch sees.
        aside.clear()
        show()
        """,
    )
    numbers = (1, 3, 2, 3, 0, 3, 2, 3, 1, 3)
    assert printed.splitlines() == [*(f"{number} 2048 1024" for number in numbers), "0 0 0"]


def test_what_a_graph_may_use_for_cublas_comes_back_to_its_own_list(gpu: Machine) -> None:
    printed = gpu.code(
        SHIM,
        INSTALLED,
        aside(),
        """
        keep(1, "a", aside.keep_lt)
        for _ in range(2):
            lowtide.pause("a")
            print(aside.count(), aside.count_lt())
            lowtide.resume("a")
            print(aside.count(), aside.count_lt())
        """,
    )
    assert printed == "0 0\n0 1\n" * 2


def test_what_a_graph_may_use_for_cublas_waits_for_a_resume_that_works(gpu: Machine) -> None:
    printed = gpu.code(
        SHIM,
        INSTALLED,
        aside(),
        """
        keep(1, "a")
        with lowtide.region("a"):
            allocate(100 << 20)
        lowtide.pause("a")
        in_its_way = allocate(100 << 20)
        for _ in range(2):
            try:
                lowtide.resume("a")
            except lowtide.OutOfMemoryError:
                print(aside.count())
        check(library().lowtide_deallocate(in_its_way))
        lowtide.resume("a")
        print(aside.count())
        """,
        FAKECUDA_CAPACITY=str(150 << 20),
    )
    assert printed == "0\n0\n1\n"


def test_what_a_graph_may_use_for_cublas_does_not_grow_from_pause_to_pause(gpu: Machine) -> None:
    printed = gpu.code(
        SHIM,
        INSTALLED,
        aside(),
        """
        def multiply(tag):
            # As PyTorch does, which makes a workspace where it has none.
            if aside.count() == 0:
                keep(1, tag)

        multiply("a")
        with lowtide.region("b"):
            held = allocate(1000)
        for _ in range(3):
            lowtide.pause("a")
            multiply("b")
            lowtide.resume("a")
            lowtide.pause("b")
            multiply("a")
            lowtide.resume("b")
        show()
        # As programs do that clean up.
        for _ in range(3):
            lowtide.pause("a")
            multiply(None)
            lowtide.resume("a")
            aside.clear()
            multiply("a")
        show()
        aside.clear()
        lowtide.resume()
        aside.clear()
        show()
        """,
    )
    assert printed == "1 1024 2048\n1 1024 2048\n0 0 1024\n"


def test_what_pytorch_keeps_for_cublas_is_its_own_again_after_a_pause_that_failed(gpu: Machine) -> None:
    printed = gpu.code(
        SHIM,
        INSTALLED,
        aside(),
        """
        keep(1, "a")
        with lowtide.region("kept", "disk"):
            aside.keep(2, allocate(1000))
        lowtide.set_backup_directory("/proc/none")
        for _ in range(2):
            try:
                lowtide.pause()
            except lowtide.BackupError:
                # One region has left all the same.
                show()
            lowtide.resume()
            show()
        """,
    )
    assert printed == "1 1024 1024\n2 1024 1024\n" * 2


def test_what_pytorch_makes_for_cublas_during_a_pause_is_taken_after_it(gpu: Machine) -> None:
    printed = gpu.code(
        SHIM,
        INSTALLED,
        aside(),
        """
        keep(1, "a")
        begin = aside.lowtide_torch_begin_pause

        class Meanwhile:
            def __getattr__(self, name):
                return getattr(aside, name)

            def lowtide_torch_begin_pause(self, tag):
                begin(tag)
                keep(2, "a")

        lowtide._install._shim = Meanwhile()
        lowtide.pause("a")
        show()
        lowtide.resume("a")
        show()
        """,
    )
    assert printed == "0 2048\n2 2048\n"


def test_what_a_pause_takes_of_cublas_does_not_come_back_with_another_change(gpu: Machine) -> None:
    printed = gpu.code(
        SHIM,
        INSTALLED,
        aside(),
        """
        keep(1, "a"), keep(2, "b")
        begin = aside.lowtide_torch_begin_pause

        class Meanwhile:
            def __getattr__(self, name):
                return getattr(aside, name)

            def lowtide_torch_begin_pause(self, tag):
                begin(tag)
                if tag == b"a":
                    lowtide.pause("b")
                    lowtide.resume()
                    show()

        lowtide._install._shim = Meanwhile()
        lowtide.pause("a")
        show()
        lowtide.resume()
        show()
        """,
    )
    assert printed == "1 1024 1024\n1 1024 1024\n2 1024 1024\n"
