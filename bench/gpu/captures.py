"""How long a graph takes to capture whose streams part and meet again, and how much memory its pool has then.

    python3 bench/gpu/captures.py [--layers N] [--repeat N]

Each layer starts two pieces of work in other streams, which read what it has made, and waits for both, as a job does
that overlaps communication. It is captured without `graph_capture_record_stream_reuse` and with it; the graph's result
is compared with what the same work computes without a graph.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from typing import Any

import torch

NUMEL = 1 << 20
OPTION = "graph_capture_record_stream_reuse"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=400, metavar="N", help="joins in the graph")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="captures of each kind, of which the median")
    asked = parser.parse_args()
    static = torch.ones(NUMEL, device="cuda")
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]
    expected = float(forward(static, sides, asked.layers).sum())
    for reuses in (False, True):
        allocator_settings(f"{OPTION}:{reuses}")
        runs = [capture(static, sides, asked.layers) for _ in range(asked.repeat)]
        if any(run[2] != expected for run in runs):
            print("a graph computes something else", file=sys.stderr)
            return 1
        seconds, pool_bytes = statistics.median(run[0] for run in runs), runs[-1][1]
        name = f"{asked.layers} joins, {'with' if reuses else 'without'} reuse"
        print(json.dumps({"name": name, "capture_ms": round(seconds * 1e3, 2), "pool_bytes": pool_bytes}), flush=True)
    return 0


def allocator_settings(text: str) -> None:
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (change or torch._C._cuda_cudaCachingAllocator_set_allocator_settings)(text)


def forward(x: Any, sides: list[Any], layers: int) -> Any:
    """Returns what the layers make of `x`; keeps to numbers that do not grow."""
    for _ in range(layers):
        x = x * 0.25
        parts = []
        for side in sides:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                part = x + 1.0
            x.record_stream(side)
            parts.append(part)
        for side, part in zip(sides, parts, strict=True):
            torch.cuda.current_stream().wait_stream(side)
            part.record_stream(torch.cuda.current_stream())
        x = parts[0] + parts[1]
    return x


def capture(static: Any, sides: list[Any], layers: int) -> tuple[float, int, float]:
    """Returns the seconds of a capture, the bytes of the graph's pool, and the sum of what the graph computes."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        start = time.perf_counter()
        result = forward(static, sides, layers)
        seconds = time.perf_counter() - start
    pool_bytes = torch.cuda.memory_reserved() - reserved
    graph.replay()
    return seconds, pool_bytes, float(result.sum())


if __name__ == "__main__":
    sys.exit(main())
