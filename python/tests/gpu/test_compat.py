"""Programs written for torch_memory_saver, and vLLM's allocator, on lowtide."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

if os.environ.get("LOWTIDE_TEST_NATIVE") == "1":
    pytest.skip("about lowtide itself", allow_module_level=True)

from gpu_helpers import MIB, bytes_of, on_a_card  # noqa: E402

SCENARIOS = Path(__file__).with_name("saver_scenarios.py")


def run(name: str, mode: str, **variables: str) -> None:
    command = [sys.executable, "-m", "lowtide", "run", str(SCENARIOS), name, mode]
    environment = {**os.environ, "LOWTIDE_COMPAT": "torch_memory_saver", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.endswith("done\n")


@on_a_card
@pytest.mark.parametrize("mode", ["torch", "preload"])
@pytest.mark.parametrize(
    "name",
    [
        "simple",
        "cuda_graph",
        "cpu_backup",
        "ended_pool",
        "disk_backup",
        "multi_device",
        "threads",
        "rl_example",
        "margin",
    ],
)
def test_programs_for_torch_memory_saver(name: str, mode: str) -> None:
    run(name, mode)


@on_a_card
@pytest.mark.parametrize("name", ["training_engine", "captured_training", "nested_region"])
def test_programs_that_are_in_a_region_as_a_whole(name: str) -> None:
    run(name, "preload", TMS_INIT_ENABLE="1", TMS_INIT_ENABLE_CPU_BACKUP="1")


@pytest.fixture
def saver() -> Any:
    from lowtide.compat.torch_memory_saver import TorchMemorySaver

    return TorchMemorySaver()


def held(tag: str) -> int:
    import lowtide

    return sum(int(seen["live_bytes"]) for seen in lowtide.regions() if seen["tag"] == tag)


def test_a_region_inside_of_disable_is_one(saver: Any) -> None:
    with saver.region("outer"):
        with saver.disable():
            apart = [bytes_of(2 * MIB)]
            with saver.region("inner"):
                inner = bytes_of(4 * MIB)
                with saver.disable():
                    apart.append(bytes_of(8 * MIB))
                more = bytes_of(4 * MIB)
            apart.append(bytes_of(16 * MIB))
        outer = bytes_of(32 * MIB)
    assert (held("inner"), held("outer")) == (8 * MIB, 32 * MIB)
    del apart, inner, more, outer


def test_graphs_of_several_regions_and_of_none_name_one_pool(saver: Any) -> None:
    pool = torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph() for _ in range(5)]
    with torch.cuda.graph(graphs[0], pool=pool):
        plain = bytes_of(2 * MIB)
    with saver.cuda_graph(graphs[1], pool=pool, tag="one"):
        first = bytes_of(4 * MIB)
    with saver.cuda_graph(graphs[2], pool=pool, tag="two", enable_cpu_backup=True):
        second = bytes_of(8 * MIB)
    with torch.cuda.graph(graphs[3], pool=pool):
        also_plain = bytes_of(2 * MIB)
    # Those of one region share one, by whichever name.
    assert graphs[1].pool() != graphs[2].pool()
    with saver.cuda_graph(graphs[4], pool=graphs[1].pool(), tag="one"):
        third = bytes_of(16 * MIB)
    assert graphs[4].pool() == graphs[1].pool()
    assert (held("one"), held("two")) == (20 * MIB, 8 * MIB)
    saver.pause("one")
    saver.resume("one")
    del plain, first, second, also_plain, third


@on_a_card
def test_memory_of_vllm_sleeps_and_wakes_up() -> None:
    from lowtide.compat.vllm import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    assert allocator is CuMemAllocator.get_instance()
    assert allocator.get_current_usage() == 0
    with allocator.use_memory_pool(tag="weights"):
        weights = torch.randn(8 * MIB, device="cuda")
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.zeros(16 * MIB, device="cuda")
    expected, addresses = weights.cpu(), (weights.data_ptr(), cache.data_ptr())
    assert allocator.get_current_usage() == 96 * MIB
    for kept in ("weights", ("weights", "kv_cache")):
        cache.fill_(1)
        free, _ = torch.cuda.mem_get_info()
        allocator.sleep(offload_tags=kept)
        # The first backup makes streams, which take 2 MiB of the card for good.
        assert torch.cuda.mem_get_info()[0] - free >= 94 * MIB
        allocator.wake_up(tags=["weights"])
        assert torch.equal(weights.cpu(), expected)
        allocator.wake_up()
        assert (weights.data_ptr(), cache.data_ptr()) == addresses
        assert kept == "weights" or bool((cache == 1).all())
    # Level 2: nothing is kept, and nothing of the host's memory is taken.
    allocator.sleep(offload_tags=())
    assert all(seen["host_bytes"] == 0 for seen in regions())
    allocator.wake_up()
    weights.copy_(expected)
    assert torch.equal(weights.cpu(), expected)
    del weights, cache
    assert allocator.get_current_usage() == 0


def regions() -> list[dict[str, object]]:
    import lowtide

    return [seen for seen in lowtide.regions() if seen["tag"] in ("weights", "kv_cache")]
