"""Programs written for torch_memory_saver, and vLLM's allocator, on lowtide."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

if os.environ.get("LOWTIDE_TEST_NATIVE") == "1":
    pytest.skip("about lowtide itself", allow_module_level=True)

from gpu_helpers import on_a_card  # noqa: E402

pytestmark = on_a_card

SCENARIOS = Path(__file__).with_name("saver_scenarios.py")
MIB = 1 << 20


def run(name: str, mode: str, **variables: str) -> None:
    command = [sys.executable, "-m", "lowtide", "run", str(SCENARIOS), name, mode]
    environment = {**os.environ, "LOWTIDE_COMPAT": "torch_memory_saver", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.endswith("done\n")


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


@pytest.mark.parametrize("name", ["training_engine", "nested_region"])
def test_programs_that_are_in_a_region_as_a_whole(name: str) -> None:
    run(name, "preload", TMS_INIT_ENABLE="1", TMS_INIT_ENABLE_CPU_BACKUP="1")


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
