"""Whether addresses stay: how often `torch.compile(mode="reduce-overhead")` records its graphs again.

    python reduce_overhead.py [--steps N]
    python -m lowtide run reduce_overhead.py [--steps N]

Trains a transformer of two layers, with a second sequence length from step 11 on. Between the steps it allocates and
frees tensors of random sizes. Prints one JSON line: the steps in which a graph was recorded, and the losses to the last
bit.
"""

import argparse
import json
import random
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch._inductor import cudagraph_trees

DEVICE = "cuda"


def main() -> None:
    """Runs the job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30, metavar="N")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    draw = random.Random(0)
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 2), nn.Linear(256, 1000)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    compiled = torch.compile(model, mode="reduce-overhead")
    recorded = count_recordings()
    in_step, losses = {}, []
    kept: list[torch.Tensor] = []
    for step in range(1, arguments.steps + 1):
        recorded.clear()
        tokens = torch.randint(0, 1000, (8, 64 if step < 11 else [64, 96][step % 2]), device=DEVICE)
        torch.compiler.cudagraph_mark_step_begin()
        loss = nn.functional.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss).hex())
        if recorded.total():
            in_step[step] = recorded.total()
        kept.append(torch.empty(int(2 ** draw.uniform(9, 25)), dtype=torch.uint8, device=DEVICE))
        if len(kept) > 8:
            del kept[draw.randrange(len(kept))]
    result = {"recorded_in_steps": in_step, "losses": losses}
    print(json.dumps(result | {"reserved_bytes": torch.cuda.max_memory_reserved()}), flush=True)


def count_recordings() -> "Counter[str]":
    """Counts the graphs that are recorded from here on."""
    counts: Counter[str] = Counter()
    record = cudagraph_trees.CUDAGraphTreeManager.record_function

    def counted(*arguments: Any, **named: Any) -> Any:
        counts["recorded"] += 1
        return record(*arguments, **named)

    cudagraph_trees.CUDAGraphTreeManager.record_function = counted
    return counts


if __name__ == "__main__":
    main()
