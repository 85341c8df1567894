"""The host's time for a pair of free and alloc, through whatever allocator PyTorch has: its own, or lowtide's.

    python latency.py [LABEL]
    lowtide run latency.py [LABEL]

Prints one JSON line for each case. The best of three runs counts: what disturbs a run only adds to it.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch.utils.cpp_extension import load

KIB, MIB = 1 << 10, 1 << 20

# threads, live blocks, pairs, smallest and largest size, number of sizes
CASES = {
    "1 thread, 1 live, 4 KiB": (1, 1, 200_000, 4 * KIB, 4 * KIB + 1, 1),
    "1 thread, 100 live, 512 B to 1 MiB": (1, 100, 200_000, 512, MIB, 64),
    "1 thread, 1,000 live, 512 B to 32 MiB": (1, 1000, 100_000, 512, 32 * MIB, 200),
    "1 thread, 10,000 live, 512 B to 1 MiB": (1, 10_000, 100_000, 512, MIB, 500),
    "1 thread, 100,000 live, 512 B to 64 KiB": (1, 100_000, 100_000, 512, 64 * KIB, 500),
    "4 threads and streams, 1,000 live each, 512 B to 1 MiB": (4, 1000, 100_000, 512, MIB, 200),
    "16 threads and streams, 1,000 live each, 512 B to 1 MiB": (16, 1000, 50_000, 512, MIB, 200),
}

# other streams that use each block, live blocks, pairs
RECORDED_CASES = {
    "1 thread, 100 live, each used in 1 more stream": (1, 100, 20_000),
    "1 thread, 100 live, each used in 4 more streams": (4, 100, 20_000),
}


def from_python(act: Callable[[], object], calls: int = 20_000) -> float:
    """Returns the nanoseconds that a call takes, the best of five runs."""
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(calls):
            act()
        best = min(best, (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return best * 1e9


def main() -> None:
    """Runs every case."""
    label = sys.argv[1] if len(sys.argv) > 1 else ""
    here = os.path.dirname(os.path.abspath(__file__))
    directory = os.path.join(tempfile.gettempdir(), "lowtide-latency")
    os.makedirs(directory, exist_ok=True)
    module = load(
        "latency", [os.path.join(here, "latency.cpp")], build_directory=directory, extra_cflags=["-O2"], with_cuda=True
    )
    torch.zeros(1, device="cuda")

    def report(name: str, nanoseconds: float) -> None:
        print(json.dumps({"name": name, "label": label, "pair_ns": round(nanoseconds, 1)}), flush=True)

    report("torch.empty(1024) and its free", from_python(lambda: torch.empty(1024, device="cuda")))
    vector = torch.empty(256, device="cuda")
    report("y + y, one small kernel", from_python(lambda: vector + vector))
    for name, case in CASES.items():
        report(name, min(module.measure(*case) for _ in range(3)))
    for name, recorded in RECORDED_CASES.items():
        report(name, min(module.measure_recorded(*recorded) for _ in range(3)))


if __name__ == "__main__":
    main()
