"""What the shim does with PyTorch's workspaces for cuBLAS, in a PyTorch that sees no GPU, on the stand-in driver.

They need the real PyTorch, and are skipped without. What needs a GPU is in `gpu`.
"""

from pathlib import Path
from textwrap import dedent

import pytest
from machine import Machine
from shim import INSTALLED, SHIM, compiled

pytest.importorskip("torch")


def skip_unless_shared() -> None:
    import torch

    header = Path(torch.__file__).parent / "include" / "ATen" / "cuda" / "CUDAContextLight.h"
    if "struct WorkspaceMapWithMutex" not in header.read_text():
        pytest.skip("an older PyTorch shows nobody what it keeps")


# The shim's own part of it, with which a graph is captured without CUDA.
ASIDE = """
    #include "{sources}/pools.h"

    #include <c10/cuda/CUDACachingAllocator.h>

    namespace caching = c10::cuda::CUDACachingAllocator;
    using lowtide::WorkspacesAside;

    static auto& cublas = at::cuda::cublas_handle_stream_to_workspace().map;
    static auto& cublas_lt = at::cuda::cublaslt_handle_stream_to_workspace().map;

    static std::tuple<void*, void*> key_of(void* handle) {{
      return {{handle, nullptr}};
    }}

    static void insert_data(at::cuda::Workspaces& workspaces, void* handle, at::DataPtr data) {{
    #if LOWTIDE_TORCH_AT_LEAST(13)
      workspaces.emplace(key_of(handle), std::pair(std::move(data), size_t(1000)));
    #else
      workspaces.emplace(key_of(handle), std::move(data));
    #endif
    }}

    extern "C" void insert(void* handle, bool is_lt, void* memory) {{
      auto& workspaces = is_lt ? cublas_lt : cublas;
      insert_data(workspaces, handle, {{memory, memory, caching::get()->raw_deleter(), at::Device("cuda:0")}});
    }}

    extern "C" const void* listed(void* handle, bool is_lt) {{
      const auto& workspaces = is_lt ? cublas_lt : cublas;
      const auto found = workspaces.find(key_of(handle));
      return found == workspaces.end() ? nullptr : lowtide::memory_of(found->second);
    }}

    extern "C" size_t count() {{
      return cublas.size();
    }}

    extern "C" size_t count_lt() {{
      return cublas_lt.size();
    }}

    extern "C" void clear() {{
      cublas.clear();
      cublas_lt.clear();
    }}

    extern "C" void begin_capture() {{
      lowtide::begin_capture(0);
    }}

    extern "C" void end_capture() {{
      lowtide::end_capture(0);
    }}

    extern "C" void* begin_pause(const char* tag) {{
      return new WorkspacesAside::Pause(tag);
    }}

    extern "C" void end_pause(WorkspacesAside::Pause* pause) {{
      delete pause;
    }}

    extern "C" lowtide_status lowtide_torch_pause(const char* tag, bool keep) {{
      return lowtide::pause_regions(tag, keep);
    }}

    extern "C" lowtide_status lowtide_torch_resume(const char* tag) {{
      return lowtide::resume_regions(tag);
    }}

    extern "C" const char* lowtide_torch_change_error() {{
      return lowtide::change_error.c_str();
    }}

    extern "C" void insert_foreign(void* handle) {{
      static char memory[1];
      insert_data(cublas, handle, at::DataPtr(memory, at::Device("cuda:0")));
    }}
"""


def aside() -> str:
    """Returns lines that put that in the shim's place, and functions to use it with."""
    from lowtide.torch import build

    skip_unless_shared()
    return dedent(compiled("aside", dedent(ASIDE).format(sources=build.SOURCES))) + dedent("""
        shim, lowtide._install._shim = lowtide._install._shim, aside
        aside.lowtide_torch_is_installed = shim.lowtide_torch_is_installed
        aside.insert.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p]
        aside.listed.argtypes, aside.listed.restype = [ctypes.c_void_p, ctypes.c_bool], ctypes.c_void_p
        aside.begin_pause.argtypes, aside.begin_pause.restype = [ctypes.c_char_p], ctypes.c_void_p
        aside.end_pause.argtypes = [ctypes.c_void_p]
        aside.lowtide_torch_pause.argtypes = [ctypes.c_char_p, ctypes.c_bool]
        aside.lowtide_torch_resume.argtypes = [ctypes.c_char_p]
        aside.lowtide_torch_change_error.restype = ctypes.c_char_p

        def capture():
            aside.begin_capture(), aside.end_capture()

        # Handles of cuBLASLt have numbers below 0 here.
        def make(handle, tag=None, size=1000):
            with lowtide.region(tag) if tag else lowtide.disable():
                memory = allocate(size)
            aside.insert(abs(handle), handle < 0, memory)
            return memory.value

        def listed(handle):
            return aside.listed(abs(handle), handle < 0)

        def keep(handle, tag=None):
            # A graph may use it from then on.
            make(handle, tag), capture()

        def multiply(handle, tag=None):
            # PyTorch makes a workspace where it has none.
            if not listed(handle):
                make(handle, tag)

        def show():
            print(aside.count(), *(seen["live_bytes"] for seen in lowtide.regions()))
    """)


def run(gpu: Machine, *steps: str, **variables: str) -> str:
    return gpu.code(SHIM, INSTALLED, aside(), *steps, **variables)


def test_the_shim_lets_go_of_what_pytorch_keeps_for_cublas_in_a_region(gpu: Machine) -> None:
    printed = run(
        gpu,
        """
        lowtide._install._shim = shim
        make(1, "a"), make(-2, "a"), make(3, "b"), make(4)
        lowtide.pause("a")
        print(aside.count(), aside.count_lt())
        lowtide.resume()
        lowtide.pause()
        show()
        """,
    )
    assert printed == "2 0\n1 0 0\n"


def test_what_a_graph_may_use_comes_back_with_its_region(gpu: Machine) -> None:
    printed = run(
        gpu,
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


def test_what_no_graph_may_use_is_let_go_of(gpu: Machine) -> None:
    printed = run(
        gpu,
        """
        keep(1, "a")
        # What is there by the next change may be of the capture; this is not.
        lowtide.resume("a")
        make(2, "a")
        lowtide.pause("a")
        show()
        lowtide.resume("a")
        show()
        # During it.
        aside.begin_capture(), make(2, "a"), aside.end_capture()
        lowtide.pause("a")
        show()
        # In the place of another.
        make(1), make(2)
        lowtide.resume("a")
        show()
        """,
    )
    assert printed == "0 1024\n1 1024\n0 2048\n2 2048\n"


def test_what_a_graph_may_use_comes_back_to_its_own_list(gpu: Machine) -> None:
    printed = run(
        gpu,
        """
        keep(-1, "a")
        for _ in range(2):
            lowtide.pause("a")
            print(aside.count(), aside.count_lt())
            lowtide.resume("a")
            print(aside.count(), aside.count_lt())
        """,
    )
    assert printed == "0 0\n0 1\n" * 2


def test_what_a_graph_may_use_waits_for_a_resume_that_works(gpu: Machine) -> None:
    printed = run(
        gpu,
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


def test_what_a_graph_may_use_is_pytorch_s_again_after_a_pause_that_failed(gpu: Machine) -> None:
    printed = run(
        gpu,
        """
        keep(1, "a")
        with lowtide.region("kept", "disk"):
            aside.insert(2, False, allocate(1000))
        capture()
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


def test_what_is_made_while_a_pause_begins_is_taken_after_it(gpu: Machine) -> None:
    printed = run(
        gpu,
        """
        keep(1, "a")
        pause = aside.begin_pause(b"a")
        keep(2, "a")
        check(library().lowtide_pause(b"a"))
        aside.end_pause(pause)
        show()
        lowtide.resume("a")
        show()
        """,
    )
    assert printed == "0 2048\n2 2048\n"


def test_what_a_pause_takes_does_not_come_back_with_another_change(gpu: Machine) -> None:
    printed = run(
        gpu,
        """
        keep(1, "a"), keep(2, "b")
        pause = aside.begin_pause(b"a")
        lowtide.pause("b")
        lowtide.resume()
        show()
        check(library().lowtide_pause(b"a"))
        aside.end_pause(pause)
        show()
        lowtide.resume()
        show()
        """,
    )
    assert printed == "1 1024 1024\n1 1024 1024\n2 1024 1024\n"


# What a program does with the workspaces of some handles, and what PyTorch would have of it without regions: a graph
# may use what was listed at any time of its capture, until the program clears it.
PROGRAM = """
    import random
    HANDLES, TAGS = (1, 2, -1), ("a", "b")
    sizes, made, used, away = iter(range(1000, 1 << 20)), {}, set(), set()
    found = (ctypes.c_uint64 * 16)()

    def is_live(size):
        status = library().lowtide_find_allocation(ctypes.c_void_p(made[size]), found)
        return status == 0 and found[2] == size

    def all_listed():
        held = {made[size]: size for size in made if is_live(size)}
        return {held[listed(handle)] for handle in HANDLES if listed(handle)}

    def multiply(handle, tag):
        if not listed(handle):
            size = next(sizes)
            made[size] = make(handle, tag, size)

    def clear():
        used.difference_update(all_listed())
        aside.clear()

    def capture(steps=()):
        aside.begin_capture()
        used.update(all_listed())
        for act in steps:
            act()
            check_all()
            used.update(all_listed())
        aside.end_capture()

    def pause(tag):
        lowtide.pause(tag)
        away.update([tag] if tag else TAGS)

    def resume(tag):
        lowtide.resume(tag)
        away.difference_update([tag] if tag else TAGS)

    def pause_meanwhile(tag, act):
        pausing = aside.begin_pause(tag.encode())
        act()
        check(library().lowtide_pause(tag.encode()))
        aside.end_pause(pausing)
        away.add(tag)

    def place_of(dice, *without):
        return dice.choice([None, *(tag for tag in TAGS if tag not in away and tag not in without)])

    def steps_with(dice):
        handle, tag, tags = dice.choice(HANDLES), dice.choice(TAGS), dice.choice([*TAGS, None])
        return [
            lambda: multiply(handle, place_of(dice)),
            lambda: multiply(handle, place_of(dice)),
            lambda: pause(tags),
            lambda: resume(tags),
            lambda: pause_meanwhile(tag, lambda: multiply(handle, place_of(dice, tag))),
        ]

    def in_capture(dice):
        # Another thread's changes, beside a side stream that multiplies before it is the capture's.
        return [dice.choice(steps_with(dice)) for _ in range(dice.randrange(8))]

    def step(dice, captures):
        steps = [*steps_with(dice), clear]
        if captures:
            # The end of one that has not begun is no news.
            steps += [lambda: capture(in_capture(dice)), lambda: capture(in_capture(dice)), aside.end_capture]
        dice.choice(steps)()

    def live():
        for size in [size for size in made if not is_live(size)]:
            del made[size]
        return set(made)

    def check_all():
        is_away = ctypes.c_bool()
        for handle in HANDLES:
            if listed(handle):
                check(library().lowtide_is_away(ctypes.c_void_p(listed(handle)), ctypes.byref(is_away)))
                assert not is_away.value, "PyTorch sees what is away"
        assert used <= live(), "a graph's is gone"

    for tag in TAGS:
        with lowtide.region(tag):
            held = allocate(1 << 20)
"""


def run_random(gpu: Machine, seed: int, steps: str) -> None:
    run(gpu, PROGRAM, f"dice = random.Random({seed})\n", steps)


@pytest.mark.parametrize("seed", range(4))
def test_of_random_programs_graphs_keep_what_they_may_use_and_nothing_else_stays(gpu: Machine, seed: int) -> None:
    run_random(
        gpu,
        seed,
        """
        for _ in range(5):
            for _ in range(dice.randrange(100)):
                step(dice, captures=True)
                check_all()
            # What is there by now may be of the last capture.
            resume(None)
            check_all()
            before = len(live())
            for _ in range(200):
                step(dice, captures=False)
                check_all()
                # Each handle may have one that no graph uses.
                assert len(live()) <= before + len(HANDLES), (before, live(), used)
        """,
    )


@pytest.mark.parametrize("seed", range(2))
def test_of_a_capture_whose_end_is_never_told_little_stays(gpu: Machine, seed: int) -> None:
    run_random(
        gpu,
        seed,
        """
        aside.begin_capture()
        for _ in range(1000):
            step(dice, captures=False)
            # One of each handle in each place.
            assert len(live()) <= len(HANDLES) * (len(TAGS) + 1), live()
        """,
    )


def test_of_two_regions_that_take_turns_nothing_stays_but_what_graphs_may_use(gpu: Machine) -> None:
    printed = run(
        gpu,
        """
        multiply(1, "a"), capture()
        for _ in range(3):
            lowtide.pause("a")
            multiply(1, "b")
            lowtide.pause("b")
            lowtide.resume()
            aside.clear()
            multiply(1, "a")
        show()
        capture()
        for _ in range(3):
            # Another thread's.
            pausing = aside.begin_pause(b"a")
            multiply(1)
            check(library().lowtide_pause(b"a"))
            aside.end_pause(pausing)
            multiply(1, "b")
            lowtide.resume("a")
            lowtide.pause("b")
            multiply(1, "a")
            lowtide.resume("b")
        show()
        print(lowtide.memory_stats()["allocation.all.current"])
        """,
    )
    assert printed == "1 1024 0\n1 1024 0\n1\n"


def test_an_error_is_told_though_a_workspace_is_not_lowtide_s(gpu: Machine) -> None:
    printed = run(
        gpu,
        """
        keep(1, "a")
        aside.insert_foreign(ctypes.c_void_p(2))
        for change in lowtide.pause, lowtide.resume:
            try:
                change("b")
            except lowtide.Error as error:
                print(error)
        """,
    )
    assert printed == 'there is no region "b": there are "a"\n' * 2
