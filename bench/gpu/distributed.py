"""Two or more cards of one host: a job under DistributedDataParallel and one under FSDP, over NCCL.

    torchrun --nproc-per-node 2 distributed.py
    torchrun --nproc-per-node 2 -m lowtide run distributed.py

Rank 0 prints one JSON line for each job, with its losses to the last bit; one for how often each peak occurred
when its beginning was repeated; and one for a buffer that was registered with NCCL and must keep its contents.

One run's peak says little: what NCCL's watchdog still holds when the buckets are made anew depends on when
that thread last looked, with any allocator.
"""

import gc
import json
import os
import time
from collections import Counter
from collections.abc import Callable

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 12
STEPS_REPEATED = 4
REPETITIONS = 24


def transformer() -> nn.Module:
    """A small transformer with the same weights on every rank."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(8000, 512), encoder, nn.Linear(512, 8000)).cuda()


def train(model: nn.Module, rank: int, steps: int) -> list[str]:
    """Returns the losses, averaged over the ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    draw = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(steps):
        length = 64 + 32 * (step % 5)
        tokens = torch.randint(0, 8000, (8, length), generator=draw).cuda(non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(float(mean).hex())
    return losses


def data_parallel(rank: int) -> nn.Module:
    """Every rank holds all parameters."""
    return DistributedDataParallel(transformer(), device_ids=[rank])


def sharded(_: int) -> nn.Module:
    """Every rank holds a part of each layer."""
    model = transformer()
    for layer in model[1].layers:
        fully_shard(layer)
    return fully_shard(model)


def peaks(build: Callable[[int], nn.Module], rank: int) -> dict[int, int]:
    """Returns how often each peak of allocated bytes occurred, above what was held before."""
    counts: Counter[int] = Counter()
    for _ in range(REPETITIONS):
        gc.collect()
        dist.barrier()
        time.sleep(0.25)  # until the watchdog has let go of the last repetition
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        train(build(rank), rank, STEPS_REPEATED)
        counts[torch.cuda.max_memory_allocated() - held] += 1
    return dict(counts.most_common())


def registered_buffer(rank: int, ranks: int) -> bool:
    """Returns whether a buffer from NCCL's own memory pool holds what it should after many reductions."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        buffer = torch.full((1 << 20,), float(rank + 1), device="cuda")
    backend.register_mem_pool(pool)
    dist.all_reduce(buffer)
    churn = [torch.full((1 << n,), 7.0, device="cuda") for n in range(10, 24)]
    del churn
    torch.cuda.empty_cache()
    expected = ranks * (ranks + 1) / 2
    is_right = bool((buffer == expected).all())
    backend.deregister_mem_pool(pool)
    return is_right


def main() -> None:
    """Runs both jobs."""
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    builds = {"ddp": data_parallel, "fsdp": sharded}
    for name, build in builds.items():
        torch.cuda.reset_peak_memory_stats()
        losses = train(build(rank), rank, STEPS)
        stats = torch.cuda.memory_stats()
        result = {"name": name, "ranks": ranks, "losses": losses}
        result |= {key: stats[f"{key}.all.peak"] for key in ("allocated_bytes", "reserved_bytes")}
        if rank == 0:
            print(json.dumps(result), flush=True)
    for name, build in builds.items():
        counts = peaks(build, rank)
        if rank == 0:
            print(json.dumps({"name": f"{name}, repeated", "allocated_bytes_peaks": counts}), flush=True)
    try:
        outcome: dict[str, object] = {"contents_right": registered_buffer(rank, ranks)}
    except Exception as error:  # whatever NCCL refuses is a result here
        outcome = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    if rank == 0:
        print(json.dumps({"name": "nccl registered buffer"} | outcome), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
