"""A random job that checks each byte that it holds, whatever the allocator.

    python random_job.py [--minutes M] [--seed S]
    lowtide run random_job.py [--minutes M] [--seed S]

Tensors of 512 bytes to 64 MiB live in four streams, some of which run behind. Each is filled with a number of its own
when it is allocated, and compared with it just before it is freed, in its stream or in another that was recorded.
In between, CUDA graphs with pools of their own are captured, replayed, checked and dropped; tensors come from a
`MemPool` of their own; caches of keys and values grow by concatenation, as in rlhf; the cache of the allocator is
emptied; and under lowtide a region is paused and resumed. Prints a JSON line a minute and one at the end; exits with 1
if a byte was wrong.
"""

import argparse
import json
import random
import sys
import time

import torch

try:
    import lowtide
except ImportError:
    lowtide = None  # type: ignore[assignment]

MIB = 2**20
DEVICE = "cuda"


class Job:
    """Everything that the job holds."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(3))]
        self.wrong = torch.zeros(len(self.streams), dtype=torch.long, device=DEVICE)
        self.held: list[tuple[torch.Tensor, int, int]] = []
        self.held_bytes = 0
        self.graphs: list[tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor, tuple[torch.Tensor, int]]] = []
        self.count = 0
        self.most = 2000 * MIB
        self.kept: torch.Tensor | None = None

    def check(self, tensor: torch.Tensor, number: int, stream: int) -> None:
        with torch.cuda.stream(self.streams[stream]):
            self.wrong[stream] += (tensor != number).sum()

    def allocate(self) -> None:
        size = int(2 ** self.draw.uniform(9, 26))
        stream = self.draw.randrange(len(self.streams))
        self.count += 1
        number = self.count % 1_000_003
        with torch.cuda.stream(self.streams[stream]):
            if self.draw.random() < 0.02:
                torch.cuda._sleep(self.draw.randrange(20_000_000))
            tensor = torch.empty(max(size // 4, 1), dtype=torch.int32, device=DEVICE).fill_(number)
        self.held.append((tensor, number, stream))
        self.held_bytes += tensor.nbytes

    def free(self) -> None:
        tensor, number, stream = self.held.pop(self.draw.randrange(len(self.held)))
        self.held_bytes -= tensor.nbytes
        self.check(tensor, number, stream)
        other = self.draw.randrange(len(self.streams))
        if other != stream:
            self.streams[other].wait_stream(self.streams[stream])
            tensor.record_stream(self.streams[other])
            self.check(tensor, number, other)

    def capture(self) -> None:
        torch.cuda.synchronize()
        graph, source = (
            torch.cuda.CUDAGraph(),
            torch.zeros(self.draw.randrange(1, 4 * MIB), dtype=torch.int32, device=DEVICE),
        )
        cuts = [self.draw.random() for _ in range(self.draw.randrange(1, 8))]

        def compute() -> torch.Tensor:
            last = first = source + 1
            for cut in cuts:
                last = torch.cat([last[: 1 + int(cut * (len(last) - 1))] + 1, first])
            return last

        at_zero = compute()
        expected = (at_zero.sum(), len(at_zero))
        del at_zero
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            result = compute().sum()
        self.graphs.append((graph, source, result, expected))

    def replay(self) -> None:
        graph, source, result, (at_zero, length) = chosen = self.draw.choice(self.graphs)
        value = self.draw.randrange(4)
        source.fill_(value)
        graph.replay()
        self.wrong[0] += (result != at_zero + length * value).long()
        if self.draw.random() < 0.1:
            torch.cuda.synchronize()
            self.graphs.remove(chosen)

    def use_pool(self) -> None:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            sizes = [int(2 ** self.draw.uniform(7, 22)) for _ in range(self.draw.randrange(1, 20))]
            tensors = [torch.full((size,), number, device=DEVICE) for number, size in enumerate(sizes)]
        for number, tensor in enumerate(tensors):
            self.check(tensor, number, 0)

    def generate(self) -> None:
        shape = (self.draw.randrange(1, 16), self.draw.randrange(1, 64), 128)
        caches = [torch.zeros(shape, dtype=torch.int32, device=DEVICE) for _ in range(8)]
        for token in range(1, self.draw.randrange(2, 48)):
            new = torch.full((shape[0], 1, 128), token, dtype=torch.int32, device=DEVICE)
            caches = [torch.cat([cache, new], dim=1) for cache in caches]
        expected = torch.arange(caches[0].shape[1] - shape[1] + 1, device=DEVICE)[1:]
        for cache in caches:
            self.wrong[0] += (cache[:, shape[1] :, 0] != expected).sum() + (cache[:, : shape[1]] != 0).sum()

    def pause(self) -> None:
        if not lowtide or not lowtide.is_installed():
            return
        if self.kept is None:
            with lowtide.region("kept", backup="host"):
                self.kept = torch.arange(16 * MIB, device=DEVICE)
        torch.cuda.synchronize()
        lowtide.pause("kept")
        for _ in range(self.draw.randrange(50)):
            self.allocate()
        lowtide.resume("kept")
        self.wrong[0] += (self.kept != torch.arange(16 * MIB, device=DEVICE)).sum()

    def step(self) -> None:
        """Does what a number drawn says."""
        kind = self.draw.random()
        if kind < 0.0002:
            self.pause()
        elif kind < 0.0004:
            torch.cuda.empty_cache()
        elif kind < 0.0008:
            self.most = self.draw.choice([200, 1000, 2000, 4000]) * MIB
        elif kind < 0.0018 and len(self.graphs) < 8:
            self.capture()
        elif kind < 0.0022:
            self.use_pool()
        elif kind < 0.0026:
            self.generate()
        elif kind < 0.01 and self.graphs:
            self.replay()
        elif self.held and (self.held_bytes > self.most or kind < 0.45):
            self.free()
        else:
            self.allocate()

    def figures(self) -> dict[str, object]:
        """What was done so far, and what is wrong."""
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        names = {"peak": "allocated_bytes.all.peak", "reserved": "reserved_bytes.all.peak"}
        figures: dict[str, object] = {name: stats[key] for name, key in names.items()}
        figures |= {"allocated": self.count, "wrong": int(self.wrong.sum()), "graphs": len(self.graphs)}
        return figures | {"maps": stats["num_device_alloc"], "unmaps": stats["num_device_free"]}


def main() -> int:
    """Runs the job and returns 1 if a byte was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0, metavar="M")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    asked = parser.parse_args()
    job = Job(asked.seed)
    start = said = time.monotonic()
    while (now := time.monotonic()) - start < asked.minutes * 60:
        for _ in range(1000):
            job.step()
        if now - said >= 60:
            said = now
            print(json.dumps({"seconds": round(now - start)} | job.figures()), flush=True)
    while job.held:
        job.free()
    figures = job.figures()
    print(json.dumps({"seconds": round(time.monotonic() - start), "end": True} | figures), flush=True)
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
