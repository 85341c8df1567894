"""What the tests on a GPU share that are about PyTorch's own interfaces."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

MIB = 1 << 20
IS_NATIVE = os.environ.get("LOWTIDE_TEST_NATIVE") == "1"

on_lowtide = pytest.mark.skipif(IS_NATIVE, reason="about lowtide itself")
_STRATEGY = os.environ.get("LOWTIDE_STRATEGY") or "tide"
# They change PyTorch's settings, or expect one segment of its own size for many blocks.
on_caching = pytest.mark.skipif(
    not IS_NATIVE and _STRATEGY != "caching", reason=f"{_STRATEGY} is not PyTorch's allocator"
)
IS_TIDE = not IS_NATIVE and _STRATEGY == "tide"
on_tide = pytest.mark.skipif(not IS_TIDE, reason="about tide")
# Without one (`fakeruntime`) memory is real, kernels do nothing, and a context is a device's primary one.
on_a_card = pytest.mark.skipif(os.environ.get("LOWTIDE_TEST_FAKE") == "1", reason="needs a card")


def version() -> tuple[int, int]:
    """Returns PyTorch's major and minor."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def bytes_of(size: int) -> Any:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


@contextmanager
def settings(text: str, default: str) -> Iterator[None]:
    """Changes PyTorch's settings, which say nothing about what they leave out."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    change = change or torch._C._cuda_cudaCachingAllocator_set_allocator_settings
    change(text)
    try:
        yield
    finally:
        change(default)


def expandable() -> AbstractContextManager[None]:
    return settings("expandable_segments:True", "expandable_segments:False")


def segment_of(address: int) -> Any:
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return segment
    raise AssertionError("the address is in no segment")


def run_ranks(program: str, strategy: str, directory: Path) -> tuple["subprocess.CompletedProcess[str]", list[str]]:
    """Runs a program of `gpu` on two ranks that ask NCCL to register all memory. Returns what NCCL logged, too."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    variables = {
        # For the launcher: with another strategy, it might keep the next variable from the ranks.
        "LOWTIDE_STRATEGY": "caching",
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "REG",
        "NCCL_DEBUG_FILE": str(directory / "%p.log"),
    }
    script = Path(__file__).parent / "gpu" / program
    command = [*launcher, "-m", "lowtide", "run", "--strategy", strategy, str(script)]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done, [log.read_text() for log in directory.glob("*.log")]
