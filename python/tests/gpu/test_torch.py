"""What torch.cuda says about memory, and does with it, through the shim."""

import ctypes
import gc
import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide._report import find_command
from lowtide._run import STARTUP
from lowtide.torch import build

torch = pytest.importorskip("torch")

from gpu_helpers import (  # noqa: E402
    IS_NATIVE,
    IS_TIDE,
    MIB,
    bytes_of,
    expandable,
    on_a_card,
    on_caching,
    on_lowtide,
    on_tide,
    segment_of,
    settings,
    version,
)

# ---- installed ----


@on_lowtide
def test_lowtide_is_the_allocator() -> None:
    assert lowtide.is_installed()
    # As PyTorch's settings have it, which may say so.
    assert torch.cuda.get_allocator_backend() == "native"


@on_caching
def test_settings_may_name_the_backend_of_pytorch() -> None:
    with settings("backend:native,max_split_size_mb:128", "backend:native"):
        assert torch.cuda.memory._snapshot()["allocator_settings"]["max_split_size"] == 128 * MIB
        assert torch.empty(4).pin_memory().is_pinned()


def test_settings_that_were_not_given_are_empty() -> None:
    program = """
import torch
print(repr(torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]))
torch.cuda.memory._set_allocator_settings("")
print(repr(torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]))
"""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "LOWTIDE_STRATEGY", "LOWTIDE_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["LOWTIDE_STRATEGY"] = "caching"
    how = [] if IS_NATIVE else ["-m", "lowtide", "run"]
    done = subprocess.run(
        [sys.executable, *how, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "''\n''\n"


RECORDED = """
import sys, torch
torch.cuda.memory._record_memory_history(stacks="python")
held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (1000, 3 << 20, 70 << 20, 1_200_000) * 3]
del held[::2]
held += [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (30 << 20, 700_000, 65 << 20)]
for change in sys.argv[2:]:
    torch.cuda.memory._set_allocator_settings(change)
    held.append(torch.empty(33 << 20, dtype=torch.uint8, device="cuda"))
torch.cuda.memory._dump_snapshot(sys.argv[1])
"""


@on_lowtide
@pytest.mark.parametrize("change", ["", "max_split_size_mb:32"])
@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "LOWTIDE_CONF"])
def test_a_snapshot_says_what_was_in_force(variable: str, change: str, tmp_path: Path) -> None:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "LOWTIDE_STRATEGY", "LOWTIDE_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"LOWTIDE_STRATEGY": "caching", variable: "expandable_segments:True,roundup_power2_divisions:4"}
    path = tmp_path / "snapshot.pickle"
    program = [sys.executable, "-m", "lowtide", "run", "-c", RECORDED, str(path), *filter(None, [change])]
    subprocess.run(program, env=environment, check=True)
    said = pickle.loads(path.read_bytes())["allocator_settings"]
    assert said["expandable_segments"] is True
    assert said["max_split_size"] == (32 * MIB if change else -1)
    # A change sets these back first.
    assert set(said["roundup_power2_divisions"].values()) == {0 if change else 4}
    text = "max_split_size_mb:32,expandable_segments:True" if change else environment[variable]
    assert sorted(said["PYTORCH_CUDA_ALLOC_CONF"].split(",")) == sorted(text.split(","))
    if not change:
        # No one setting was in force for all of a job that changed it.
        replayed = subprocess.run(
            [find_command(), "replay", "--verify", "--json", str(path)], capture_output=True, text=True, check=True
        )
        verified = json.loads(replayed.stdout)["results"][0]["verified"]
        assert verified["first_difference"] is None
        assert verified["same_address"] == verified["compared"] == 15


def test_of_blocks_of_a_size_the_one_of_this_release_is_taken() -> None:
    # Memory that nothing else has any part of.
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        quarters = [bytes_of(MIB // 2) for _ in range(4)]
        first, last = quarters[0].data_ptr(), quarters[3].data_ptr()
        del quarters[3], quarters[0]
        taken = bytes_of(MIB // 2)
    assert taken.data_ptr() == (last if version() == (2, 12) else first)


def test_of_blocks_of_a_size_the_one_of_the_older_segment_is_taken() -> None:
    torch.cuda.empty_cache()
    gone, older = bytes_of(12 * MIB), bytes_of(12 * MIB)
    del gone
    torch.cuda.empty_cache()
    newer = bytes_of(12 * MIB)
    places = older.data_ptr(), newer.data_ptr()
    del older, newer
    expected = min(places) if version() < (2, 12) else places[0]
    assert bytes_of(12 * MIB).data_ptr() == expected


@on_lowtide
def test_it_is_too_late_for_another_allocator() -> None:
    bytes_of(1)
    with pytest.raises(RuntimeError, match="already initialized"):
        torch.cuda.memory.change_current_allocator(torch.cuda.memory._CUDAAllocator(custom_allocator([], [])))


@on_lowtide
def test_a_forked_child_drops_what_it_inherits() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        held = bytes_of(MIB)
    child = os.fork()
    if child == 0:
        # What fails here ends the process by a signal.
        del held, pool
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@on_lowtide
def test_another_allocator_in_its_place_is_noticed() -> None:
    program = """
import ctypes, lowtide, torch
allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(lambda *_: None)
free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(lambda *_: None)
lowtide.install()
assert lowtide.is_installed()
addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (allocate, free)]
torch._C._cuda_changeCurrentAllocator(torch._C._cuda_customAllocator(*addresses))
assert not lowtide.is_installed()
try:
    with lowtide.region("weights"):
        pass
except lowtide.Error as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "lowtide is not PyTorch's allocator" in done.stdout


# ---- figures ----


def test_all_keys_are_there_and_the_summary_is_written() -> None:
    held = bytes_of(3 * MIB)
    figures = torch.cuda.memory_stats()
    by_pool = (
        *("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes"),
        *("active_bytes", "inactive_split_bytes", "requested_bytes"),
    )
    for name in by_pool:
        for pool in ("all", "small_pool", "large_pool"):
            for member in ("current", "peak", "allocated", "freed"):
                assert f"{name}.{pool}.{member}" in figures
    for name in ("oversize_allocations", "oversize_segments"):
        assert f"{name}.current" in figures
    for name in (
        "num_alloc_retries",
        "num_ooms",
        "num_sync_all_streams",
        "num_device_alloc",
        "max_split_size",
    ):
        assert name in figures
    assert "Allocated memory" in torch.cuda.memory_summary()
    assert "Allocated memory" in torch.cuda.memory_summary(abbreviated=True)
    del held


def test_sizes_are_counted_as_requested_and_as_rounded() -> None:
    before = torch.cuda.memory_stats()
    held = bytes_of(1000)
    during = torch.cuda.memory_stats()
    del held
    after = torch.cuda.memory_stats()

    def change(key: str, figures: Any) -> int:
        return int(figures[key] - before[key])

    assert change("allocated_bytes.small_pool.current", during) == 1024
    assert change("requested_bytes.all.current", during) == 1000
    assert change("allocation.all.current", during) == 1
    assert change("allocated_bytes.all.current", after) == 0
    assert change("allocated_bytes.all.freed", after) == 1024
    assert torch.cuda.memory_allocated() == after["allocated_bytes.all.current"]


def test_peaks_are_kept_until_they_are_reset() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held = bytes_of(8 * MIB)
    del held
    assert torch.cuda.max_memory_allocated() == before + 8 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocated_bytes.all.allocated"] == 0


def test_empty_cache_gives_back_what_is_free() -> None:
    held = bytes_of(64 * MIB)
    free = bytes_of(128 * MIB)
    reserved = torch.cuda.memory_reserved()
    del free
    assert torch.cuda.memory_reserved() == reserved
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - 128 * MIB
    assert torch.cuda.memory_reserved() >= 64 * MIB
    del held


def test_memory_info_is_the_driver_s() -> None:
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total == torch.cuda.get_device_properties(0).total_memory


# ---- running out ----


def test_a_fraction_limits_what_is_reserved() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    fraction = (held + 256 * MIB) / total
    torch.cuda.set_per_process_memory_fraction(fraction)
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(fraction, abs=1e-6)
    ok = bytes_of(128 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="allowed"):
        bytes_of(256 * MIB)
    torch.cuda.set_per_process_memory_fraction(1.0)
    bytes_of(256 * MIB)
    del ok


def test_out_of_memory_is_pytorch_s_error_and_the_next_request_works() -> None:
    before = torch.cuda.memory_stats()["num_ooms"]
    with pytest.raises(
        torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 1048576\.00 GiB"
    ) as caught:
        bytes_of(1 << 50)
    assert "GPU 0 has a total capacity of" in str(caught.value)
    assert torch.cuda.memory_stats()["num_ooms"] == before + 1
    bytes_of(MIB).fill_(1)
    torch.cuda.synchronize()
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate more than 1EB memory\."):
        bytes_of(1 << 61)


# NVIDIA's management library, as far as PyTorch looks for it.
MANAGEMENT = """
#include <unistd.h>
typedef struct { unsigned int number; unsigned long long bytes; } process;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device) { *device = (void *)address; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }
int nvmlDeviceGetGpuFabricInfoV(void) { return 3; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned int *count, process *processes) {
    unsigned int room = *count;
    *count = 10;
    for (unsigned int i = 0; i < room && i < 10; i++) {
        processes[i] = (process){i + 1, (unsigned long long)(i + 1) << 29};
    }
    if (room >= 10) processes[9].number = getpid();
    return room < 10 ? 7 : 0;
}
"""


def test_running_out_says_what_other_processes_have_in_use(tmp_path: Path) -> None:
    source = tmp_path / "management.c"
    source.write_text(MANAGEMENT)
    library = tmp_path / "libnvidia-ml.so.1"
    linked = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    subprocess.run([*build.compiler(), "-x", "c", *linked, "-o", library, source], check=True)
    program = "import torch; torch.empty(1 << 50, dtype=torch.uint8, device='cuda')"
    how = [] if IS_NATIVE else ["-m", "lowtide", "run"]
    preloaded = [str(library), *filter(None, [os.environ.get("LD_PRELOAD")])]
    environment = {**os.environ, "LD_PRELOAD": ":".join(preloaded)}
    done = subprocess.run(
        [sys.executable, *how, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    found = re.search(r"is free\. (.*?)Of the allocated memory", done.stderr)
    assert found is not None, done.stderr
    others = "".join(f"Process {i} has {i * 0.5:.2f} GiB memory in use. " for i in range(3, 10))
    first = "Process 1 has 512.00 MiB memory in use. Process 2 has 1024.00 MiB memory in use. "
    this = "Including non-PyTorch memory, this process has 5.00 GiB memory in use. "
    assert found[1] == first + others + this


def hold_weights() -> Any:
    return bytes_of(96 * MIB)


@on_lowtide
def test_running_out_says_who_holds_memory_and_what_would_have_fitted() -> None:
    torch.cuda.memory._record_memory_history(stacks="python")
    weights = [hold_weights() for _ in range(3)]
    # What is not on the device is held by nobody there.
    with lowtide.region("away"):
        away = hold_weights()
    lowtide.pause("away")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        bytes_of(1 << 50)
    torch.cuda.memory._record_memory_history(enabled=None)
    _, by_stack, holders, gap, *others = str(caught.value).splitlines()
    # Graphs of other tests may keep memory, which a line of its own says.
    fitting = next(line for line in others if line.startswith("Would have fitted: "))
    assert by_stack.startswith("Biggest holders by call stack: ")
    assert "288.00 MiB in 3 blocks" in by_stack
    assert "hold_weights (" in by_stack
    assert "test_torch.py:" in by_stack
    assert holders.startswith("Biggest holders: 3 x 96.00 MiB")
    assert gap.startswith("Reserved and not live: ")
    assert fitting.startswith("Would have fitted: nothing. What is live and this request are ")
    del away, weights
    lowtide.resume("away")


def advice(is_expandable: bool) -> str:
    """Returns what this release advises when memory runs out. `tide` does not read the setting."""
    if IS_TIDE:
        return ""
    if is_expandable and version() >= (2, 14):
        if version() == (2, 14):
            return ""
        return (
            " expandable_segments is enabled. If instead the process is running out of virtual address space (VSZ), "
            "expandable segments may be over-reserving VA (each segment reserves ~9/8 of device memory, times the "
            "number of streams); reduce it via PYTORCH_CUDA_ALLOC_CONF expandable_segments_reserve / "
            "expandable_segments_reserve_by_class."
        )
    variable = "PYTORCH_ALLOC_CONF" if version() == (2, 10) else "PYTORCH_CUDA_ALLOC_CONF"
    document = (
        "docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
        if version() >= (2, 11)
        else "pytorch.org/docs/stable/notes/cuda.html#environment-variables"
    )
    return (
        f" If reserved but unallocated memory is large try setting {variable}=expandable_segments:True to avoid "
        f"fragmentation.  See documentation for Memory Management  (https://{document})"
    )


@pytest.mark.parametrize("is_expandable", [False, True])
def test_running_out_reads_as_in_this_release(is_expandable: bool) -> None:
    held = bytes_of(3 * MIB)
    in_force = settings(f"expandable_segments:{is_expandable}", "expandable_segments:False")
    with in_force, pytest.raises(torch.OutOfMemoryError) as caught:
        bytes_of(1 << 50)
    del held
    text = str(caught.value).splitlines()[0].partition(" The largest free block has ")[0]
    size = r"\d+(\.\d\d [KMG]iB| bytes)"
    figures = (
        rf"CUDA out of memory\. Tried to allocate 1048576\.00 GiB\. GPU 0 has a total capacity of {size} of which "
        rf"{size} is free\. (.* memory in use\. )?Of the allocated memory {size} is allocated by PyTorch, "
        rf"(with {size} allocated in private pools \(e\.g\., CUDA Graphs\), )?and {size} is reserved by PyTorch but "
        r"unallocated\."
    )
    assert re.fullmatch(figures + re.escape(advice(is_expandable)), text), text


def test_observers_are_notified_of_memory_that_ran_out() -> None:
    notified: list[tuple[int, int, int, int]] = []

    def observe(device: int, allocated: int, total: int, free: int) -> None:
        # Without a lock: it may use the allocator.
        torch.cuda.memory_stats()
        notified.append((device, allocated, total, free))

    torch._C._cuda_attach_out_of_memory_observer(observe)
    with pytest.raises(torch.OutOfMemoryError):
        bytes_of(1 << 50)
    ((device, size, total, free),) = notified
    assert (device, size, total) == (0, 1 << 50, torch.cuda.get_device_properties(0).total_memory)
    assert 0 < free <= total


# ---- history ----


def test_a_snapshot_shows_what_is_held() -> None:
    held = bytes_of(3000)
    segment = segment_of(held.data_ptr())
    assert segment["segment_type"] == "small"
    assert segment["device"] == 0
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    states = [block for block in segment["blocks"] if block["address"] == held.data_ptr()]
    assert [(b["size"], b["requested_size"], b["state"]) for b in states] == [(3072, 3000, "active_allocated")]
    assert segment["active_size"] >= segment["allocated_size"] >= 3072
    assert torch.cuda.memory._snapshot()["segments"]


def recorded(**options: Any) -> list[dict[str, Any]]:
    """Takes and frees 24 MiB while history is recorded, and returns the trace."""
    torch.cuda.memory._record_memory_history(**options)
    held = bytes_of(24 * MIB)
    del held
    torch.cuda.empty_cache()
    trace: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][0]
    return trace


@on_caching
def test_history_tells_everything_that_happens() -> None:
    torch.cuda.empty_cache()
    trace = recorded(stacks="python")
    actions = [entry["action"] for entry in trace]
    assert actions == ["segment_alloc", "alloc", "free_requested", "free_completed", "segment_free"]
    assert all(entry["size"] == 24 * MIB for entry in trace)
    assert len({entry["addr"] for entry in trace}) == 1
    assert all(any(frame["name"] == "recorded" for frame in entry["frames"]) for entry in trace)
    times = [entry["time_us"] for entry in trace]
    assert times == sorted(times)
    # Microseconds since 1970: after 2020, before 2100.
    assert 1_577_836_800_000_000 < times[0] < 4_102_444_800_000_000


@on_lowtide
@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs Python 3.11")
def test_a_recording_has_the_functions_of_a_backward_pass(tmp_path: Path) -> None:
    """It runs in a thread of which Python knows nothing."""
    layer = torch.nn.Linear(512, 512, device="cuda")
    torch.cuda.synchronize()
    with lowtide.record(tmp_path / "step.lowtide", stacks=True):
        layer(torch.ones(64, 512, device="cuda")).sum().backward()
    commands = Path(lowtide.__file__).parents[1] / "bin"
    command = shutil.which("lowtide", path=os.pathsep.join([str(commands), os.environ["PATH"]]))
    assert command is not None
    subprocess.run([command, "convert", tmp_path / "step.lowtide", tmp_path / "step.pickle"], check=True)
    trace = pickle.loads((tmp_path / "step.pickle").read_bytes())["device_traces"][0]
    stacks = [[frame["name"] for frame in entry["frames"]] for entry in trace if entry["action"] == "alloc"]
    python = [names for names in stacks if "test_a_recording_has_the_functions_of_a_backward_pass" in names]
    backward = [names for names in stacks if any("torch::autograd::Engine" in name for name in names)]
    assert python, stacks
    assert backward, stacks
    assert len(python) + len(backward) == len(stacks), stacks
    assert not any(name.startswith("lowtide::") for names in backward for name in names)


def test_a_block_remembers_who_allocated_it() -> None:
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history("state", stacks="python")
    held = bytes_of(24 * MIB)
    segment = segment_of(held.data_ptr())
    (block,) = (b for b in segment["blocks"] if b["address"] == held.data_ptr())
    assert any(frame["name"] == "bytes_of" for frame in block["frames"])
    assert any(frame["name"] == "bytes_of" for frame in segment["frames"])
    del held


def test_who_allocated_what_is_held_stays_known_once_history_is_off() -> None:
    def known(*tensors: Any) -> list[bool]:
        blocks = {b["address"]: b for s in torch.cuda.memory._snapshot()["segments"] for b in s["blocks"]}
        return [bool(blocks[tensor.data_ptr()].get("frames")) for tensor in tensors]

    torch.cuda.memory._record_memory_history(max_entries=1000)
    first, second, third = (bytes_of(MIB) for _ in range(3))
    stream = torch.cuda.Stream()
    third.record_stream(stream)
    del third
    torch.cuda.memory._record_memory_history(enabled=None)
    unknown = bytes_of(MIB // 2)
    assert known(first, second, unknown) == [True, True, False]
    # Whoever comes to have an address is not who had it before.
    torch.cuda.synchronize()
    address = first.data_ptr()
    del first
    others = [bytes_of(MIB) for _ in range(4)]
    assert address in [other.data_ptr() for other in others]
    assert known(second, *others) == [True, False, False, False, False]
    torch.cuda.memory._record_memory_history(max_entries=1000)
    assert known(second, bytes_of(MIB)) == [True, True]


def test_only_the_latest_entries_are_kept() -> None:
    torch.cuda.memory._record_memory_history(max_entries=3, stacks="python")
    for _ in range(10):
        bytes_of(1000)
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    assert [entry["action"] for entry in trace] == ["alloc", "free_requested", "free_completed"]


def test_pictures_and_shortages_are_in_the_history() -> None:
    torch.cuda.memory._record_memory_history(stacks="python")
    with pytest.raises(torch.OutOfMemoryError):
        bytes_of(1 << 50)
    torch.cuda.memory._snapshot()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    assert [entry["action"] for entry in trace][-2:] == ["oom", "snapshot"]
    assert 0 < trace[-2]["device_free"] <= torch.cuda.get_device_properties(0).total_memory


@on_caching
@pytest.mark.skipif(version() < (2, 11), reason="newer")
def test_actions_can_be_left_out() -> None:
    trace = recorded(stacks="python", skip_actions=["free_requested", "segment_alloc"])
    assert {entry["action"] for entry in trace} == {"alloc", "free_completed", "segment_free"}


def test_ranges_are_in_the_history() -> None:
    torch.cuda.memory._record_memory_history(stacks="python", global_record_annotations=True)
    with torch.autograd.profiler.record_function("a range"):
        bytes_of(1000)
    ranges = torch.cuda.memory._snapshot()["external_annotations"]
    assert [(r["name"], r["stage"]) for r in ranges if r["name"] == "a range"] == [
        ("a range", "START"),
        ("a range", "END"),
    ]


@pytest.mark.skipif(version() < (2, 10), reason="newer")
def test_the_user_s_text_is_in_the_history() -> None:
    torch.cuda.memory._record_memory_history(stacks="python")
    torch.cuda.memory._set_memory_metadata("step 3")
    bytes_of(1000)
    torch.cuda.memory._set_memory_metadata("")
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    assert trace[0]["user_metadata"] == "step 3"


@pytest.mark.skipif(version() < (2, 14), reason="newer")
def test_a_note_has_the_stack_of_who_wrote_it() -> None:
    torch.cuda.memory._record_memory_history(stacks="python")
    held = bytes_of(1000)
    torch.cuda.memory._annotate_tensor(held, "a note")
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    (noted,) = (entry for entry in trace if entry["action"] == "annotate")
    assert "bytes_of" not in [frame["name"] for frame in noted["frames"]]
    assert any(frame["name"].startswith("test_a_note") for frame in noted["frames"])


def test_pytorch_s_viewer_reads_a_dump(tmp_path: Path) -> None:
    from torch.cuda import _memory_viz

    trace = recorded()
    file = tmp_path / "snapshot.pickle"
    torch.cuda.memory._dump_snapshot(str(file))
    snapshot = pickle.loads(file.read_bytes())
    assert len(snapshot["device_traces"][0]) == len(trace) + 1
    assert "24.0MiB" in _memory_viz.trace(snapshot)
    assert _memory_viz.segsum(snapshot)
    assert _memory_viz.trace_plot(snapshot)


def test_history_in_many_threads() -> None:
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                bytes_of(1000)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    assert sum(entry["action"] == "alloc" for entry in trace) == 8 * 200
    assert sum(entry["action"] == "free_completed" for entry in trace) == 8 * 200


# ---- streams ----


@on_a_card
def test_recorded_memory_is_not_reused_while_another_stream_reads_it() -> None:
    size = 4 * MIB
    side = torch.cuda.Stream()
    source = torch.full((size,), 7, dtype=torch.uint8, device="cuda")
    result = torch.zeros(size, dtype=torch.uint8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        result.copy_(source)
    source.record_stream(side)
    address = source.data_ptr()
    del source
    # Whatever comes now is written at once, long before the side stream reads.
    others = [torch.full((size,), 9, dtype=torch.uint8, device="cuda") for _ in range(4)]
    assert all(other.data_ptr() != address for other in others)
    torch.cuda.synchronize()
    assert bool((result == 7).all())
    # Once it has read, the memory serves again.
    bytes_of(1)
    assert bytes_of(size).data_ptr() == address


def test_streams_do_not_share_blocks() -> None:
    held = bytes_of(4 * MIB)
    address = held.data_ptr()
    del held
    with torch.cuda.stream(torch.cuda.Stream()):
        assert bytes_of(4 * MIB).data_ptr() != address
    assert bytes_of(4 * MIB).data_ptr() == address


def test_recording_what_is_empty_or_foreign_does_nothing() -> None:
    side = torch.cuda.Stream()
    torch.empty(0, device="cuda").record_stream(side)


@on_tide
def test_idle_memory_of_one_of_pytorchs_streams_serves_another() -> None:
    torch.cuda.empty_cache()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        bytes_of(256 * MIB).zero_()
    with torch.cuda.stream(second):
        # It needs the driver, which is then asked how far the first stream has come. It may get some of that memory.
        held = [bytes_of(2 * MIB)]
        torch.cuda.synchronize()
        reserved = torch.cuda.memory_reserved()
        held.append(bytes_of(240 * MIB))
    assert torch.cuda.memory_reserved() == reserved
    assert [tensor.numel() for tensor in held] == [2 * MIB, 240 * MIB]


# ---- memory pools ----


@on_a_card
def test_a_pool_serves_what_is_allocated_under_it() -> None:
    pool = torch.cuda.MemPool()
    assert pool.use_count() == 1
    with torch.cuda.use_mem_pool(pool):
        assert pool.use_count() == 2
        inside = torch.full((MIB,), 3.0, device="cuda")
        elsewhere: list[Any] = []
        thread = threading.Thread(target=lambda: elsewhere.append(torch.ones(MIB, device="cuda")))
        thread.start()
        thread.join()
    outside = torch.ones(MIB, device="cuda")
    assert pool.use_count() == 1
    assert tuple(segment_of(inside.data_ptr())["segment_pool_id"]) == tuple(pool.id)
    assert tuple(segment_of(outside.data_ptr())["segment_pool_id"]) == (0, 0)
    assert tuple(segment_of(elsewhere[0].data_ptr())["segment_pool_id"]) == (0, 0)
    assert [tuple(segment["segment_pool_id"]) for segment in pool.snapshot()] == [tuple(pool.id)]
    assert bool((inside == 3.0).all())
    reserved = torch.cuda.memory_reserved()
    del inside, pool
    gc.collect()
    assert torch.cuda.memory_reserved() < reserved


ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

# PyTorch keeps addresses of functions: they must live as long as the process.
_callbacks: list[Any] = []


def custom_allocator(taken: list[int], given_back: list[int]) -> Any:
    """An allocator of the user's, by cudaMalloc, that notes what it does."""
    runtime = ctypes.CDLL(None)

    def allocate(size: int, _device: int, _stream: int) -> int | None:
        memory = ctypes.c_void_p()
        if runtime.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(size)) != 0:
            return None
        taken.append(size)
        return memory.value

    def release(memory: int, size: int, _device: int, _stream: int) -> None:
        runtime.cudaFree(ctypes.c_void_p(memory))
        given_back.append(size)

    functions = ALLOCATE(allocate), RELEASE(release)
    _callbacks.extend(functions)
    addresses = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    return torch._C._cuda_customAllocator(*addresses)


@on_a_card
def test_a_pool_takes_its_segments_from_the_user_s_allocator() -> None:
    taken: list[int] = []
    given_back: list[int] = []
    allocator = custom_allocator(taken, given_back)
    pool = torch.cuda.MemPool(allocator)
    with torch.cuda.use_mem_pool(pool):
        first = torch.full((MIB // 4,), 1.0, device="cuda")
        second = torch.full((MIB // 4,), 2.0, device="cuda")
    # Both come out of one segment of 2 MiB.
    assert taken == [2 * MIB]
    assert float(first.sum() + second.sum()) == 3.0 * (MIB // 4)
    assert sum(segment["total_size"] for segment in pool.snapshot()) == 2 * MIB
    del first, second
    assert given_back == []
    del pool
    gc.collect()
    assert given_back == taken


def test_a_pool_of_the_user_s_helps_where_memory_runs_out() -> None:
    if version() < (2, 8):
        pytest.skip("newer")
    pool = torch.cuda.MemPool(use_on_oom=True)
    with torch.cuda.use_mem_pool(pool):
        held = bytes_of(64 * MIB)
    del held
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + MIB) / total)
    helped = bytes_of(40 * MIB)
    assert tuple(segment_of(helped.data_ptr())["segment_pool_id"]) == tuple(pool.id)
    del helped, pool


# ---- other ways to memory ----


def test_raw_memory_is_taken_and_given_back() -> None:
    before = torch.cuda.memory_allocated()
    address = torch.cuda.caching_allocator_alloc(MIB, device=0, stream=torch.cuda.Stream())
    assert torch.cuda.memory_allocated() == before + MIB
    torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() == before
    with pytest.raises(RuntimeError, match="invalid device pointer"):
        torch.cuda.caching_allocator_delete(address)
    assert not torch.cuda.caching_allocator_alloc(0)


@on_a_card
def test_caching_can_be_turned_off_and_on() -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.caching_allocator_enable(False)
    try:
        uncached = torch.full((MIB,), 4.0, device="cuda")
        assert torch.cuda.memory_allocated() == before
    finally:
        torch.cuda.caching_allocator_enable(True)
    cached = torch.full((MIB,), 5.0, device="cuda")
    assert torch.cuda.memory_allocated() == before + 4 * MIB
    assert float(uncached[0] + cached[0]) == 9.0
    # Each goes back where it came from, once.
    del uncached, cached
    assert torch.cuda.memory_allocated() == before
    address = torch.cuda.caching_allocator_alloc(MIB)
    torch.cuda.caching_allocator_delete(address)
    with pytest.raises(RuntimeError, match="invalid device pointer"):
        torch.cuda.caching_allocator_delete(address)


@on_a_card
def test_cudnn_finds_its_fastest_convolution() -> None:
    torch.backends.cudnn.benchmark = True
    try:
        convolution = torch.nn.Conv2d(16, 32, 3, padding=1).cuda()
        images = torch.randn(8, 16, 64, 64, device="cuda")
        result = convolution(images)
        result.sum().backward()
        torch.cuda.synchronize()
        assert result.shape == (8, 32, 64, 64)
    finally:
        torch.backends.cudnn.benchmark = False


@on_a_card
def test_the_profiler_sees_memory() -> None:
    from torch.profiler import ProfilerActivity, profile

    bytes_of(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        held = bytes_of(3 * MIB)
        del held
    averages = {event.key: event.self_device_memory_usage for event in profiled.key_averages()}
    assert averages["aten::empty"] == 3 * MIB


@pytest.mark.skipif(version() < (2, 9), reason="newer")
def test_torch_accelerator_knows_the_same() -> None:
    # So large that its segment is its own.
    held = bytes_of(24 * MIB)
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated()
    assert torch.accelerator.max_memory_allocated() == torch.cuda.max_memory_allocated()
    assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved()
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
    del held
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    reserved = torch.cuda.memory_reserved()
    torch.accelerator.empty_cache()
    assert torch.cuda.memory_reserved() < reserved
    if version() >= (2, 10):
        assert torch.accelerator.get_memory_info()[1] == torch.cuda.mem_get_info()[1]


# ---- expandable segments, and settings at run time ----


@on_a_card
def test_expandable_segments_grow_and_shrink() -> None:
    torch.cuda.empty_cache()
    with expandable(), torch.cuda.stream(torch.cuda.Stream()):
        held = [bytes_of(24 * MIB) for _ in range(3)]
        segments = {segment_of(tensor.data_ptr())["address"] for tensor in held}
        assert len(segments) == 1
        segment = segment_of(held[0].data_ptr())
        assert segment["is_expandable"]
        assert segment["total_size"] >= 72 * MIB
        for index, tensor in enumerate(held):
            tensor.fill_(index)
        assert [int(tensor[-1]) for tensor in held] == [0, 1, 2]
        reserved = torch.cuda.memory_reserved()
        del held, tensor
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= reserved - 60 * MIB


@on_caching
@on_lowtide
def test_settings_at_run_time_reach_lowtide() -> None:
    with settings("roundup_power2_divisions:4", "roundup_power2_divisions:1"):
        before = torch.cuda.memory_allocated()
        held = bytes_of(5 * MIB // 4 + 1)
        # The next of four steps between 1 MiB and 2 MiB.
        assert torch.cuda.memory_allocated() - before == 3 * MIB // 2
        del held
    torch.cuda.memory._set_allocator_settings(b"max_split_size_mb:64")
    assert torch.cuda.memory._snapshot()["allocator_settings"]["max_split_size"] == 64 * MIB
    with (
        pytest.raises((ValueError, RuntimeError), match="no_such_setting"),
        settings("no_such_setting:1", ""),
    ):
        pass


# ---- other devices, other processes ----


def _receive(queue: Any, answers: Any) -> None:
    if not IS_NATIVE:
        import lowtide

        lowtide.install()
    while True:
        tensor = queue.get()
        if tensor is None:
            return
        answers.put((int(tensor.sum()), tensor.numel()))
        tensor.fill_(3)
        torch.cuda.synchronize()
        answers.put("written")
        del tensor


def exchange(make: Callable[[], Any]) -> None:
    """Has another process read and write tensors, of which `make` returns one."""
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    other = context.Process(target=_receive, args=(queue, answers))
    other.start()
    try:
        for _ in range(3):
            tensor = make()
            # Before it is sent: the other process writes as soon as it has answered.
            expected = int(tensor.sum()), tensor.numel()
            queue.put(tensor)
            assert answers.get(timeout=120) == expected
            assert answers.get(timeout=120) == "written"
            assert bool((tensor == 3).all())
        queue.put(None)
        other.join(120)
        assert other.exitcode == 0
    finally:
        other.kill()


@on_a_card
def test_another_process_uses_a_tensor() -> None:
    torch.cuda.empty_cache()
    neighbours = [bytes_of(1000) for _ in range(3)]
    exchange(lambda: torch.arange(100, dtype=torch.int32, device="cuda"))
    del neighbours


@on_a_card
def test_another_process_uses_a_tensor_in_expandable_segments() -> None:
    torch.cuda.empty_cache()
    with expandable(), torch.cuda.stream(torch.cuda.Stream()):
        exchange(lambda: torch.arange(3 * MIB, dtype=torch.int32, device="cuda"))


def _contents(tensor: Any) -> tuple[int, list[int]]:
    """Returns the sum, and the first number of each 2 MiB: pieces that are exchanged leave the sum as it is."""
    return int(tensor.sum()), tensor[:: 2 * MIB // tensor.element_size()].tolist()


def _compare(found: tuple[int, list[int]], expected: tuple[int, list[int]], what: str) -> None:
    wrong = [index for index, pair in enumerate(zip(found[1], expected[1], strict=True)) if pair[0] != pair[1]]
    assert found == expected, f"{what}: the sum is {found[0]} for {expected[0]}, these pieces differ: {wrong[:10]}"


def _receive_large(queue: Any, answers: Any) -> None:
    lowtide.install()
    answers.put(resource.getrlimit(resource.RLIMIT_NOFILE))
    tensor = queue.get()
    answers.put(_contents(tensor))
    tensor.neg_()
    torch.cuda.synchronize()
    answers.put("written")


def share_large(size: int) -> None:
    """Has another process read and write a tensor of so many bytes, and frees it."""
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    other = context.Process(target=_receive_large, args=(queue, answers))
    other.start()
    try:
        assert answers.get(timeout=120) == resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, 1024)
        before = torch.cuda.memory_allocated()
        tensor = torch.arange(size // 8, device="cuda")
        total, firsts = (size // 8) * (size // 8 - 1) // 2, list(range(0, size // 8, 2 * MIB // 8))
        _compare(_contents(tensor), (total, firsts), "written here")
        queue.put(tensor)
        _compare(answers.get(timeout=120), (total, firsts), "read there")
        assert answers.get(timeout=120) == "written"
        _compare(_contents(tensor), (-total, [-first for first in firsts]), "written there")
        other.join(120)
        assert other.exitcode == 0
    finally:
        other.kill()
    del tensor
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < size


@on_tide
@on_a_card
def test_another_process_uses_more_memory_than_files_may_be_open() -> None:
    # 2,048 frames of 2 MiB, which are sent as file descriptors.
    program = (
        "import resource, sys; sys.path[:0] = sys.argv[1:]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))\n"
        "import lowtide; lowtide.install()\n"
        "from test_torch import share_large; share_large(4 << 30)\n"
    )
    here = Path(__file__).parent
    command = [sys.executable, "-c", program, str(here), str(here.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


PLAIN = """
import sys, torch
assert "lowtide" not in sys.modules, "PyTorch is not on its own allocator"
held = {}
streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
for step in range(300):
    with torch.cuda.stream(streams[step % 2]):
        held[step] = torch.full((1 + step * 7919**2 % 5_000_000,), step, device="cuda")
    torch.cuda.synchronize()
    if step % 3 == 2:
        gone = held.pop(step - 1)
        assert bool((gone == step - 1).all()), f"step {step}: {gone.unique().tolist()[:10]}"
        del gone
    if step % 25 == 24:
        torch.cuda.empty_cache()
wrong = {step: tensor.unique().tolist()[:10] for step, tensor in held.items() if not bool((tensor == step).all())}
assert not wrong, wrong
left, right = (torch.arange(n, dtype=torch.float64).view(500, -1) % 1000 for n in (1_000_000, 500_000))
product = (left.cuda().t() @ right.cuda()).cpu()
assert torch.equal(product, left.t() @ right), "a product is wrong"
print("done")
"""


@on_lowtide
@on_a_card
def test_plain_pytorch_computes_the_same_with_tide_in_front_of_the_driver() -> None:
    dropped = ("LOWTIDE_COMPAT", "LOWTIDE_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    # `lowtide run` installs lowtide in its children, too.
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != str(STARTUP))
    environment["LOWTIDE_STRATEGY"] = "tide"
    command = [sys.executable, "-m", "lowtide", "run", "--preload", sys.executable, "-c", PLAIN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), f"{done.stdout}\n{done.stderr}"
    # Only what lowtide served has peaks.
    assert "lowtide: device 0: peak " in done.stderr, done.stderr
