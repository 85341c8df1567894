"""These run on a machine with a GPU and PyTorch, on lowtide:

    lowtide run -m pytest python/tests/gpu

or without `lowtide run`, when lowtide is installed here. With LOWTIDE_TEST_NATIVE=1 they run on PyTorch's own
allocator: what they expect is its behaviour, and all but those of lowtide's own pass there too.
"""

import gc
import os
from collections.abc import Iterator

import pytest

try:
    import torch
except ImportError:
    HAS_GPU = False
else:
    HAS_GPU = torch.cuda.is_available()

# Without a GPU there is nothing to collect here.
collect_ignore_glob = [] if HAS_GPU else ["test_*.py"]

if HAS_GPU and os.environ.get("LOWTIDE_TEST_NATIVE") != "1":
    import lowtide

    lowtide.install()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Every test begins and ends with nothing cached, no history, no limit and the default streams."""
    torch.cuda.init()
    yield
    # `torch.cuda.graph` leaves its own stream behind when the capture fails.
    for device in range(torch.cuda.device_count()):
        torch.cuda.set_stream(torch.cuda.default_stream(device))
    torch.cuda.set_device(0)
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
