"""A job made up at random that runs short of memory and goes on: to record PyTorch with, and to verify replays.

    python3 fakeruntime/run.py 2.11.0 fakeruntime/made_up_job.py OUT.pickle SEED FEATURES FRACTION STEPS
    lowtide replay --strategy caching --verify OUT.pickle

FEATURES is what it uses beside the default stream and pool: s for three more streams, p for memory pools, g for graph
captures, - for none. FRACTION of the card's memory is its limit; 0 is none. Settings are PYTORCH_CUDA_ALLOC_CONF, and
the card's bytes FAKECUDA_CAPACITY. Prints how many events and refusals there were.
"""

import os
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20
# So much of what it may hold is in use at most after a step.
FULL = 0.85


class Job:
    """What a job has, and what it may do next."""

    def __init__(self, seed: int, features: str, fraction: float) -> None:
        self.choose = random.Random(seed)
        self.features = features
        total = torch.cuda.get_device_properties(0).total_memory
        self.allowed = int(total * (fraction or 1))
        more = 3 if "s" in features else 0
        self.streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(more))]
        self.live: list[torch.Tensor] = []
        self.pools: list[Any] = []
        # Each with what it holds.
        self.graphs: list[tuple[Any, list[torch.Tensor]]] = []
        self.refusals = 0

    def step(self) -> None:
        """Does one thing."""
        kind = self.choose.random()
        if kind < 0.72:
            self.come_and_go()
        elif kind < 0.80 and "p" in self.features:
            self.use_pool()
        elif kind < 0.86 and "g" in self.features:
            self.capture()
        elif kind < 0.90 and self.graphs:
            self.graphs.pop(self.choose.randrange(len(self.graphs)))
        elif kind < 0.94 and self.pools:
            self.pools.pop(self.choose.randrange(len(self.pools)))
        elif kind < 0.955:
            torch.cuda.empty_cache()
        elif kind < 0.985:
            torch.cuda.synchronize()
        while sum(block.numel() for block in self.live) > self.allowed * FULL:
            self.drop()
        if self.choose.random() < 0.01:
            self.live.clear()

    def come_and_go(self) -> None:
        for _ in range(10):
            if self.live and len(self.live) >= 25 and self.choose.random() >= 0.55:
                self.drop()
                continue
            with torch.cuda.stream(self.choose.choice(self.streams)):
                block = self.ask(self.size())
            if block is None:
                for _ in range(self.choose.randrange(6)):
                    self.drop()
                continue
            self.live.append(block)
            if len(self.streams) > 1 and self.choose.random() < 0.25:
                block.record_stream(self.choose.choice(self.streams))

    def use_pool(self) -> None:
        if not self.pools or self.choose.random() < 0.4:
            self.pools.append(torch.cuda.MemPool())
        with torch.cuda.use_mem_pool(self.choose.choice(self.pools)):
            asked = [self.ask(self.size()) for _ in range(self.choose.randrange(1, 8))]
        self.live += [block for block in asked if block is not None]

    def capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        shares = bool(self.graphs) and self.choose.random() < 0.5
        pool = self.choose.choice(self.graphs)[0].pool() if shares else None
        kept = []
        with torch.cuda.graph(graph, pool=pool):
            for _ in range(self.choose.randrange(2, 10)):
                block = self.ask(self.size() // 2 + 1)
                if block is not None and self.choose.random() < 0.3:
                    kept.append(block)
        self.graphs.append((graph, kept))

    def size(self) -> int:
        kind = self.choose.random()
        if kind < 0.5:
            return self.choose.randrange(1, MIB)
        if kind < 0.8:
            return self.choose.randrange(MIB, 10 * MIB)
        if kind < 0.97:
            return self.choose.randrange(10 * MIB, max(self.allowed // 12, 11 * MIB))
        return self.choose.randrange(self.allowed // 12, self.allowed // 3)

    def ask(self, size: int) -> torch.Tensor | None:
        try:
            return torch.empty(size, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            self.refusals += 1
            return None

    def drop(self) -> None:
        if self.live:
            self.live.pop(self.choose.randrange(len(self.live)))


def main() -> None:
    """Runs the job and writes its snapshot."""
    if len(sys.argv) != 6:
        sys.exit("usage: made_up_job.py OUT.pickle SEED FEATURES FRACTION STEPS")
    out, seed, features, fraction, steps = sys.argv[1:]
    torch.cuda.init()
    if float(fraction):
        torch.cuda.set_per_process_memory_fraction(float(fraction))
    torch.cuda.memory._record_memory_history(max_entries=2_000_000, stacks="python", context=None)
    job = Job(int(seed), features, float(fraction))
    for _ in range(int(steps)):
        job.step()
    snapshot = torch.cuda.memory._snapshot()
    with Path(out).open("wb") as file:
        pickle.dump(snapshot, file)
    print("events", len(snapshot["device_traces"][0]), "refusals", job.refusals, flush=True)
    # What becomes of graphs and pools at the end is no part of it.
    os._exit(0)


if __name__ == "__main__":
    main()
