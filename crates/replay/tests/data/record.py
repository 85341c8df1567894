#!/usr/bin/env python3
"""Records the jobs of this directory: runs each on a GPU and writes what PyTorch's allocator did.

usage: record.py RECORDING...      run and record these, one after the other
       record.py                   run and record all of them

Writes RECORDING.pickle.gz, the memory snapshot, and for recordings that have their beginning
RECORDING.stats.json, what torch.cuda.memory_stats said at the end. The names are the keys of
RECORDINGS. Needs torch 2.11 where the name says no other, for `compiled` and `evaluated` also a C compiler, and a
GPU of 140 GiB: a recording with a memory fraction depends on the card's size.
"""

import gc
import gzip
import json
import os
import pickle
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from torch import nn

DIRECTORY = Path(__file__).parent
# The first argument of the process that records.
HERE = "--here"


class Recording(NamedTuple):
    """One job under one setting."""

    job: str
    # PYTORCH_CUDA_ALLOC_CONF.
    conf: str = ""
    # The part of the card's memory that the job may hold.
    memory_fraction: Optional[float] = None
    # PyTorch keeps the last events only: with fewer than the job has, the beginning is lost.
    events_max: int = 2_000_000
    # Steps that are taken before recording starts.
    steps_unrecorded: int = 0
    # Of the events, the first ones that are taken away: a ring that was as much smaller.
    events_dropped: int = 0

    @property
    def has_beginning(self):
        return self.events_max >= 2_000_000 and self.steps_unrecorded == self.events_dropped == 0


EXPANDABLE = "expandable_segments:True"
RECORDINGS = {
    "multistream": Recording("multistream"),
    "multistream.exp": Recording("multistream", EXPANDABLE),
    "graphs": Recording("graphs"),
    "graphs.exp": Recording("graphs", EXPANDABLE),
    "compiled": Recording("compiled"),
    "mempool": Recording("mempool"),
    "mempool.exp": Recording("mempool", EXPANDABLE),
    "rl": Recording("rl"),
    "gnn.cap": Recording("gnn", memory_fraction=0.012),
    "gnn.gc": Recording("gnn", "garbage_collection_threshold:0.5", memory_fraction=0.02),
    "varlen.gc": Recording("varlen", "garbage_collection_threshold:0.6", memory_fraction=0.04),
    "varlen.round4": Recording("varlen", "roundup_power2_divisions:4"),
    "varlen.roundlist": Recording("varlen", "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"),
    "varlen.split64": Recording("varlen", "max_split_size_mb:64"),
    "varlen.split200.cap": Recording(
        "varlen", "max_split_size_mb:200,max_non_split_rounding_mb:30", memory_fraction=0.033
    ),
    "varlen.large40exp": Recording("varlen", "large_segment_size_mb:40,expandable_segments:True"),
    "shrinking.exp": Recording("shrinking", EXPANDABLE, memory_fraction=0.03),
    "shrinking.gcexp": Recording(
        "shrinking", f"garbage_collection_threshold:0.6,{EXPANDABLE}", memory_fraction=0.03
    ),
    "idle.gc": Recording("idle", "garbage_collection_threshold:0.5", memory_fraction=0.015),
    "idle.gcexp": Recording(
        "idle", f"garbage_collection_threshold:0.5,{EXPANDABLE}", memory_fraction=0.015
    ),
    "serving.split32": Recording("serving", "max_split_size_mb:32,roundup_power2_divisions:8"),
    "branches": Recording("branches"),
    "branches.exp": Recording("branches", EXPANDABLE),
    "lending": Recording("lending", memory_fraction=0.01),
    "lending.exp": Recording("lending", EXPANDABLE, memory_fraction=0.01),
    "evaluated": Recording("evaluated"),
    "evaluated.exp": Recording("evaluated", EXPANDABLE),
    "evaluated.split40": Recording("evaluated", "max_split_size_mb:40,roundup_power2_divisions:4"),
    "random.split32": Recording("random_sizes", "max_split_size_mb:32"),
    "random.gcsplit40": Recording(
        "random_sizes", "max_split_size_mb:40,garbage_collection_threshold:0.5", memory_fraction=0.02
    ),
    "randomstreams.split32": Recording(
        "random_streams", "max_split_size_mb:32", memory_fraction=0.02
    ),
    "randomstreams.gc": Recording(
        "random_streams", "garbage_collection_threshold:0.6", memory_fraction=0.02
    ),
    "randompools.split32": Recording("random_pools", "max_split_size_mb:32"),
    "randompools.gc": Recording(
        "random_pools", "garbage_collection_threshold:0.6", memory_fraction=0.02
    ),
    "ring": Recording("varlen", events_max=5000),
    "ring.exp": Recording("varlen", EXPANDABLE, events_max=5000),
    "ringms": Recording("multistream", events_max=8000),
    "ringserving.exp": Recording("serving", EXPANDABLE, events_max=3000),
    "cut.multistream": Recording("multistream", events_dropped=11_249),
    "cut.varlen.round4": Recording("varlen", "roundup_power2_divisions:4", events_dropped=4_182),
    "cut.serve": Recording("paged", events_dropped=8_405),
    "cut.randomstreams.split32": Recording(
        "random_streams", "max_split_size_mb:32", events_dropped=4_087
    ),
    "late": Recording("graphs", steps_unrecorded=3),
    # Each with the torch that it is named after.
    "fewsizes.torch2.12": Recording("few_sizes"),
    "fewsizes.exp.torch2.12": Recording("few_sizes", EXPANDABLE),
    "fewsizes.torch2.15": Recording("few_sizes"),
    "cut.fewsizes.torch2.12": Recording("few_sizes", events_dropped=700),
    "cut.fewsizes.torch2.15": Recording("few_sizes", events_dropped=700),
    # Each on a card of 2 GB.
    "full.exp": Recording("random_sizes", EXPANDABLE),
    "fullpools.exp": Recording("random_pools", EXPANDABLE),
}


def main():
    if sys.argv[1:2] == [HERE]:
        record(sys.argv[2])
    names = sys.argv[1:] or list(RECORDINGS)
    if unknown := [name for name in names if name not in RECORDINGS]:
        sys.exit(f"no such recording: {', '.join(unknown)}; there are {', '.join(RECORDINGS)}")
    # Each in a process of its own: PyTorch reads its settings once, and nothing may have been used.
    for name in names:
        environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": RECORDINGS[name].conf}
        command = [sys.executable, __file__, HERE, name]
        subprocess.run(command, env=environment, check=True)


def record(name):
    recording = RECORDINGS[name]
    torch.manual_seed(0)
    random.seed(0)
    if recording.steps_unrecorded == 0:
        record_history(recording)
    if recording.memory_fraction:
        torch.cuda.set_per_process_memory_fraction(recording.memory_fraction)

    step, steps = JOBS[recording.job](random.Random(1))
    for index in range(recording.steps_unrecorded):
        step(index)
    if recording.steps_unrecorded > 0:
        record_history(recording)
    refused = 0
    for index in range(steps):
        try:
            step(index)
        except torch.OutOfMemoryError:
            refused += 1
            gc.collect()
    torch.cuda.synchronize()
    write(name, recording, refused)
    # Tearing the job down is no part of it.
    os._exit(0)


def record_history(recording):
    torch.cuda.memory._record_memory_history(
        enabled="all", context=None, stacks="python", max_entries=recording.events_max
    )


def write(name, recording, refused):
    stats = torch.cuda.memory_stats()
    snapshot = torch.cuda.memory._snapshot()
    events = snapshot["device_traces"][0]
    del events[: recording.events_dropped]
    with gzip.open(DIRECTORY / f"{name}.pickle.gz", "wb", 6) as file:
        pickle.dump(snapshot, file)
    if recording.has_beginning:
        (DIRECTORY / f"{name}.stats.json").write_text(json.dumps(stats))
    events = sum(len(events) for events in snapshot["device_traces"])
    reserved_mib = stats["reserved_bytes.all.peak"] >> 20
    print(f"{name}: {events} events, {refused} refused, {reserved_mib} MiB reserved", flush=True)


# The jobs. Each returns a function that takes one step, and how many steps there are. `choose` is
# seeded: the same sizes come in every run.


def mlp(width=1024, layers=4):
    return nn.Sequential(
        *[
            layer
            for _ in range(layers)
            for layer in (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        ]
    ).cuda()


def multistream(choose):
    """Blocks that up to three streams use, and that outlive their step."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    kept = []

    def step(_):
        with torch.cuda.stream(first):
            x = torch.randn(choose.choice([256, 512, 700, 1111]), 1024, device="cuda")
            y = x * 2
            z = torch.randn(choose.randrange(1, 4_000_000), device="cuda")
        torch.cuda.current_stream().wait_stream(first)
        x.record_stream(torch.cuda.current_stream())
        z.record_stream(second)
        with torch.cuda.stream(second):
            second.wait_stream(first)
            w = z.sin()
            torch.cuda._sleep(choose.randrange(200_000, 20_000_000))
            longer = torch.cat([w, z])
        w.record_stream(first)
        longer.record_stream(torch.cuda.current_stream())
        del z
        kept.append(longer)
        if len(kept) > 3:
            kept.pop(choose.randrange(3))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        del x, y

    return step, 60


class Captured(NamedTuple):
    graph: object
    input: object
    output: object
    total: object


def graphs(choose):
    """CUDA graphs that are captured, share a pool, are replayed and dropped."""
    model = mlp(512, 3)
    captured = {}

    def capture(rows, pool=None):
        x = torch.randn(rows, 512, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                model(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            y = model(x)
            z = torch.cat([y, y * 2])
            q = z.softmax(-1).sum()
        return Captured(graph, x, y, q)

    def step(index):
        phase = index % 7
        if phase == 0:
            captured["a"] = capture(choose.randrange(100, 3000))
        if phase == 1:
            captured["b"] = capture(choose.randrange(100, 3000), captured["a"].graph.pool())
        if phase == 2:
            captured["c"] = capture(4096)
        for each in list(captured.values()):
            each.input.normal_()
            each.graph.replay()
            float(each.total)
        x = torch.randn(choose.randrange(100, 5000), 512, device="cuda")
        model(x).sum().backward()
        if phase == 4:
            captured.pop("b", None)
            gc.collect()
        if phase == 5:
            torch.cuda.empty_cache()
        if phase == 6:
            captured.clear()
            gc.collect()
            if index % 2:
                torch.cuda.empty_cache()

    return step, 42


def compiled(_):
    """torch.compile with graphs, whose pools it restores to checkpoints."""
    model = mlp(512, 2)
    function = torch.compile(model, mode="reduce-overhead")

    def step(index):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn([128, 256, 640][index // 6 % 3], 512, device="cuda")
        function(x).sum().backward()
        model.zero_grad()

    return step, 30


def mempool(choose):
    """Memory pools of the program's own, of which one at a time ends."""
    pools = []
    model = mlp(512, 2)

    def step(index):
        if index % 5 == 0:
            pools.append(torch.cuda.MemPool())
        with torch.cuda.use_mem_pool(pools[-1]):
            x = torch.randn(choose.randrange(1000, 9000), 512, device="cuda")
            y = x * 2
            t = [torch.empty(choose.randrange(1, 300_000), device="cuda") for _ in range(20)]
        model(x).sum().backward()
        model.zero_grad()
        del t, x
        if index % 5 == 4:
            del y
            pools.pop(0)
            gc.collect()
        if index % 10 == 9:
            torch.cuda.empty_cache()

    return step, 40


def gnn(choose):
    """Message passing over graphs of random sizes: no two requests alike."""
    width = 256
    layers = [nn.Linear(width, width).cuda(), nn.Linear(width, width).cuda()]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)

    def step(_):
        nodes, edges = choose.randrange(2000, 60000), choose.randrange(10000, 500000)
        x = torch.randn(nodes, width, device="cuda")
        source = torch.randint(0, nodes, (edges,), device="cuda")
        target = torch.randint(0, nodes, (edges,), device="cuda")
        for layer in layers:
            x = torch.zeros_like(x).index_add(0, target, layer(x)[source]).relu()
        reached = torch.unique(target)
        loss = x[reached].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, 60


def rl(choose):
    """Generation with caches that grow by concatenation, then training; empty_cache between."""
    model = mlp(1024, 4)
    optimizer = torch.optim.Adam(model.parameters())

    def step(index):
        with torch.no_grad():
            prompts, length = choose.choice([4, 8, 16]), choose.randrange(10, 400)
            kv = torch.randn(prompts, length, 1024, device="cuda")
            for _ in range(60):
                kv = torch.cat([kv, model(kv[:, -1:])], 1)
        torch.cuda.empty_cache()
        x = kv[:, :256].clone()
        del kv
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if index % 3 == 0:
            torch.cuda.empty_cache()

    return step, 40


def varlen(choose):
    """Training with another length every step."""
    model = mlp(2048, 6)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step(_):
        x = torch.randn(choose.randrange(300, 9000), 2048, device="cuda")
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    return step, 40


def shrinking(choose):
    """Batches that grow until they are refused and are then halved, copied by three side streams."""
    model = mlp(1024, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    streams = [torch.cuda.Stream() for _ in range(3)]
    kept = []
    rows = 20_000

    def step(index):
        nonlocal rows
        try:
            x = torch.randn(rows, 1024, device="cuda")
            stream = streams[index % 3]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                y = torch.cat([x, x * 3])
                torch.cuda._sleep(choose.randrange(10_000_000))
                kept.append(y[:1000].clone())
            x.record_stream(stream)
            y.record_stream(torch.cuda.current_stream())
            del y
            if len(kept) > 6:
                del kept[choose.randrange(6)]
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            rows = int(rows * 1.3) + choose.randrange(999)
        except torch.OutOfMemoryError:
            rows = max(500, rows // 2)
            optimizer.zero_grad()
            raise

    return step, 70


def idle(choose):
    """Blocks of four streams that others still use, while what is long idle goes back."""
    model = mlp(512, 3)
    streams = [torch.cuda.Stream() for _ in range(4)]
    kept = []

    def step(index):
        own, other = streams[index % 4], streams[(index + 1) % 4]
        with torch.cuda.stream(own):
            x = torch.randn(choose.randrange(100, 20000), 512, device="cuda")
            y = x.sin()
            torch.cuda._sleep(choose.randrange(5_000_000))
        torch.cuda.current_stream().wait_stream(own)
        y.record_stream(torch.cuda.current_stream())
        x.record_stream(other)
        with torch.cuda.stream(other):
            other.wait_stream(own)
            kept.append(x[:500].clone())
        model(y).sum().backward()
        model.zero_grad()
        if len(kept) > 9:
            del kept[choose.randrange(9)]

    return step, 80


def serving(choose):
    """Graphs for many batch sizes that share a pool, beside requests of other sizes, and their end."""
    model = mlp(512, 4).half()
    inputs = torch.randn(4096, 512, device="cuda").half()
    caches = [
        torch.empty(choose.randrange(1 << 20, 1 << 24), device="cuda", dtype=torch.int8)
        for _ in range(20)
    ]
    captured = []

    def capture(rows):
        for _ in range(2):
            model(inputs[:rows])
        graph = torch.cuda.CUDAGraph()
        pool = captured[0].graph.pool() if captured else None
        with torch.cuda.graph(graph, pool=pool):
            y = model(inputs[:rows])
            probabilities = y.float().softmax(-1)
        captured.append(Captured(graph, inputs, y, probabilities))

    @torch.no_grad()
    def step(index):
        phase = index % 20
        if phase == 0:
            for rows in [4096, 2048, 1024, 512, 300, 256, 128, 64, 32, 16, 8, 4, 2, 1]:
                capture(rows)
        for each in captured[::3]:
            each.graph.replay()
        model(inputs[: choose.randrange(1, 4096)])
        torch.empty(choose.randrange(1, 1 << 25), device="cuda", dtype=torch.int8)
        if phase == 9:
            del captured[choose.randrange(1, 3) :: 2]
            gc.collect()
        if phase == 12:
            torch.cuda.empty_cache()
        if phase == 19:
            captured.clear()
            gc.collect()
            if choose.random() < 0.5:
                torch.cuda.empty_cache()
            del caches[:2]

    return step, 80


def branches(choose):
    """Captures of two streams, whose blocks the other uses, kept and dropped in any order."""
    model = mlp(256, 2)
    captured = []

    @torch.no_grad()
    def step(index):
        x = torch.randn(choose.randrange(32, 2000), 256, device="cuda")
        model(x)
        torch.cuda.synchronize()
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            a = x * 2
            side.wait_stream(main)
            with torch.cuda.stream(side):
                b = model(a)
                c = b.sin()
                torch.empty_like(c)
            a.record_stream(side)
            d = a.cos()
            main.wait_stream(side)
            b.record_stream(main)
            e = (b + d).softmax(-1)
            del a, d
        graph.replay()
        captured.append(Captured(graph, x, e, c))
        y = torch.randn(choose.randrange(1, 1 << 22), device="cuda")
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.current_stream())
            z = y * 3
        y.record_stream(side)
        z.record_stream(torch.cuda.current_stream())
        del y, z
        if len(captured) > 4:
            captured.pop(choose.randrange(4))
            gc.collect()
        if index % 11 == 10:
            torch.cuda.empty_cache()

    return step, 40


def lending(choose):
    """Pools of the program's own that lend what they hold before a request is refused."""
    pools, kept = [], []

    def request(least, most):
        return torch.empty(choose.randrange(least, most), dtype=torch.int8, device="cuda")

    def step(index):
        if index % 10 == 0:
            pool = torch.cuda.MemPool(use_on_oom=True)
            with torch.cuda.use_mem_pool(pool):
                filled = [request(1 << 20, 60 << 20) for _ in range(4)]
            del filled
            pools.append(pool)
        kept.append(request(1 << 16, 120 << 20))
        if len(kept) > 12:
            del kept[choose.randrange(len(kept))]
        if index % 29 == 28:
            pools.pop(0)
            gc.collect()
        if len(kept) > 8 and choose.random() < 0.1:
            kept.clear()

    return step, 120


def evaluated(_):
    """torch.compile with graphs, trained and evaluated by turns: pools go from one checkpoint to another."""
    model = mlp(256, 3)
    function = torch.compile(model, mode="reduce-overhead", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = []

    def step(index):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn([64, 128, 200][index // 5 % 3], 256, device="cuda")
        y = function(x)
        if index % 4 == 3:
            with torch.no_grad():
                kept.append(function(x).clone())
        else:
            y.sum().backward()
            optimizer.step()
            model.zero_grad()
        if len(kept) > 3:
            kept.pop(0)
        if index % 16 == 15:
            gc.collect()
            torch.cuda.empty_cache()

    return step, 48


def paged(choose):
    """Requests that come and go, with caches that grow block by block; a CUDA graph for each number of them."""
    model = mlp(512, 2)
    caches, graphs, pool = {}, {}, torch.cuda.graph_pool_handle()
    for batch in (1, 2, 4, 8):
        x = torch.zeros(batch, 512, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            model(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool), torch.no_grad():
            y = model(x)
        graphs[batch] = (graph, x, y)

    def grow():
        for key in list(caches):
            caches[key].append(torch.empty(16, 512, device="cuda"))
            if choose.random() < 0.02:
                caches.pop(key)
            elif choose.random() < 0.05:
                caches[key] = [torch.cat(caches[key])]
        fitting = (batch for batch in graphs if batch <= max(1, len(caches)))
        graph, x, y = graphs[max(fitting, default=1)]
        x.normal_()
        graph.replay()
        y.argmax(-1).cpu()

    def prefill():
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            model(torch.randn(choose.randrange(1, 5000), 512, device="cuda"))
            torch.cuda.current_stream().synchronize()

    def step(index):
        for _ in range(choose.randrange(0, 4)):
            caches[choose.random()] = [torch.empty(choose.randrange(1, 500), 512, device="cuda")]
        for _ in range(10):
            grow()
        if index % 13 == 12:
            thread = threading.Thread(target=prefill)
            thread.start()
            thread.join()

    return step, 80


def random_bytes(choose):
    """A block of a size at random: half of them small, a few very large."""
    kind = choose.random()
    if kind < 0.5:
        size = choose.randrange(1, 1 << 20)
    elif kind < 0.8:
        size = choose.randrange(1 << 20, 10 << 20)
    elif kind < 0.97:
        size = choose.randrange(10 << 20, 60 << 20)
    else:
        size = choose.randrange(60 << 20, 300 << 20)
    return size


def drop_some(live, choose, bytes_max):
    while sum(block.numel() for block in live) > bytes_max:
        live.pop(choose.randrange(len(live)))


def random_sizes(choose):
    """Blocks of one stream that come and go at random."""
    live = []

    def step(_):
        for _ in range(60):
            if len(live) < 40 or choose.random() < 0.5:
                live.append(torch.empty(random_bytes(choose), dtype=torch.uint8, device="cuda"))
            else:
                live.pop(choose.randrange(len(live)))
            drop_some(live, choose, 2_000_000_000)
        if choose.random() < 0.03:
            torch.cuda.empty_cache()
        if choose.random() < 0.04:
            live.clear()

    return step, 60


def few_sizes(choose):
    """Blocks of a few sizes on two streams: often several free ones are of the size that is asked for."""
    streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
    sizes = [factor << bits for factor in (1, 3, 7) for bits in (11, 16)] + [3 << 20, 5 << 20, 12 << 20]
    live = []

    def step(_):
        for _ in range(30):
            if not live or choose.random() < 0.52:
                with torch.cuda.stream(choose.choice(streams)):
                    block = torch.empty(choose.choice(sizes), dtype=torch.uint8, device="cuda")
                live.append(block)
            else:
                live.pop(choose.randrange(len(live)))
        if choose.random() < 0.3:
            torch.cuda.empty_cache()

    return step, 40


def random_streams(choose):
    """The same on four streams, some of whose blocks others use."""
    streams = [torch.cuda.default_stream()] + [torch.cuda.Stream() for _ in range(3)]
    live = []

    def step(_):
        for _ in range(60):
            stream = choose.choice(streams)
            if len(live) < 40 or choose.random() < 0.5:
                with torch.cuda.stream(stream):
                    block = torch.empty(random_bytes(choose), dtype=torch.uint8, device="cuda")
                    if block.numel() < 1 << 22:
                        block.fill_(1)
                    live.append(block)
                if choose.random() < 0.25:
                    block.record_stream(choose.choice(streams))
            else:
                live.pop(choose.randrange(len(live)))
            drop_some(live, choose, 1_900_000_000)
        if choose.random() < 0.1:
            torch.cuda.synchronize()
        if choose.random() < 0.03:
            torch.cuda.empty_cache()
        if choose.random() < 0.03:
            live.clear()

    return step, 60


def random_pools(choose):
    """The same with graphs and pools of the program's own, which end in any order."""
    streams = [torch.cuda.default_stream()] + [torch.cuda.Stream() for _ in range(3)]
    pools, graphs, live = [], [], []

    def request(size):
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def come_and_go():
        for _ in range(10):
            stream = choose.choice(streams)
            if len(live) < 40 or choose.random() < 0.5:
                with torch.cuda.stream(stream):
                    live.append(request(random_bytes(choose)))
                if choose.random() < 0.2:
                    live[-1].record_stream(choose.choice(streams))
            else:
                live.pop(choose.randrange(len(live)))

    def fill_pool():
        if not pools or choose.random() < 0.5:
            pools.append(torch.cuda.MemPool())
        with torch.cuda.use_mem_pool(choose.choice(pools)):
            for _ in range(choose.randrange(1, 8)):
                live.append(request(random_bytes(choose)))

    def capture():
        graph = torch.cuda.CUDAGraph()
        shares = graphs and choose.random() < 0.5
        pool, kept = (choose.choice(graphs)[0].pool() if shares else None), []
        with torch.cuda.graph(graph, pool=pool):
            for _ in range(choose.randrange(2, 10)):
                block = request(random_bytes(choose) // 2 + 1)
                block.fill_(1)
                if choose.random() < 0.3:
                    kept.append(block)
        graphs.append((graph, kept))

    def step(_):
        kind = choose.random()
        if kind < 0.72:
            come_and_go()
        elif kind < 0.80:
            fill_pool()
        elif kind < 0.86:
            capture()
        elif kind < 0.89 and graphs:
            graphs.pop(choose.randrange(len(graphs)))
        elif kind < 0.92 and pools:
            pools.pop(choose.randrange(len(pools)))
        elif kind < 0.94:
            torch.cuda.empty_cache()
        elif kind < 0.97:
            torch.cuda.synchronize()
        drop_some(live, choose, 1_500_000_000)
        if choose.random() < 0.01:
            live.clear()

    return step, 250


JOBS = {
    job.__name__: job
    for job in (
        multistream,
        graphs,
        compiled,
        mempool,
        gnn,
        rl,
        varlen,
        shrinking,
        idle,
        serving,
        branches,
        lending,
        evaluated,
        paged,
        random_sizes,
        few_sizes,
        random_streams,
        random_pools,
    )
}

if __name__ == "__main__":
    main()
