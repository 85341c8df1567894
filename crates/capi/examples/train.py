"""Trains a small transformer with PyTorch's own allocator, or with lowtide as its pluggable one.

    cargo build --release -p lowtide-capi
    python3 crates/capi/examples/train.py native
    LOWTIDE_STRATEGY=caching python3 crates/capi/examples/train.py target/release/liblowtide.so

Prints one object: the last loss, milliseconds of a step, and the peaks in bytes.
"""

import ctypes
import json
import os
import sys
import time

import torch
from torch import nn


class Stat(ctypes.Structure):
    """`struct lowtide_memory_stat` of lowtide.h."""

    _fields_ = [("key", ctypes.c_char * 96), ("value", ctypes.c_int64)]


def install(path):
    """Makes lowtide PyTorch's allocator, with the hooks that plain C can serve."""
    allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "lowtide_malloc", "lowtide_free")
    library = ctypes.CDLL(path)
    hooks = allocator.allocator()

    def address(name):
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value

    hooks.set_init_fn(address("lowtide_init"))
    hooks.set_reset_fn(address("lowtide_reset"))
    hooks.set_record_stream_fn(address("lowtide_hook_record_stream"))
    hooks.set_base_alloc_fn(address("lowtide_base_alloc"))
    hooks.set_memory_fraction_fn(address("lowtide_hook_set_memory_fraction"))
    torch.cuda.memory.change_current_allocator(allocator)
    return library


def memory_stats(library):
    """Returns what torch.cuda.memory_stats() cannot with a pluggable allocator."""
    count = ctypes.c_size_t()
    library.lowtide_memory_stats(0, None, ctypes.c_size_t(0), ctypes.byref(count))
    stats = (Stat * count.value)()
    status = library.lowtide_memory_stats(0, stats, count, ctypes.byref(count))
    if status != 0:
        raise RuntimeError(f"lowtide_memory_stats answered {status}")
    return {stat.key.decode(): stat.value for stat in stats}


def train(steps):
    """Returns the last loss and the milliseconds of a step, the first ten left out."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Embedding(5000, 512), nn.TransformerEncoder(layer, 6), nn.Linear(512, 5000))
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    generator = torch.Generator().manual_seed(1)
    side = torch.cuda.Stream()
    for step in range(steps):
        length = int(torch.randint(64, 256, (1,), generator=generator))
        batch = torch.randint(0, 5000, (16, length), generator=generator).pin_memory()
        with torch.cuda.stream(side):
            tokens = batch.cuda(non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        tokens.record_stream(torch.cuda.current_stream())
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        last = loss.item()
        if step == 9:
            torch.cuda.synchronize()
            start = time.time()
    torch.cuda.synchronize()
    return last, (time.time() - start) / (steps - 10) * 1e3


def main():
    library = None if sys.argv[1] == "native" else install(os.path.abspath(sys.argv[1]))
    loss, step_ms = train(60)
    stats = torch.cuda.memory_stats() if library is None else memory_stats(library)
    keys = ["allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_device_alloc"]
    allocator = "native" if library is None else os.environ.get("LOWTIDE_STRATEGY", "caching")
    figures = {key: stats[key] for key in keys}
    print(json.dumps({"allocator": allocator, "loss": loss, "step_ms": round(step_ms, 2), **figures}))


main()
