"""Whether addresses stay: how often `torch.compile(mode="reduce-overhead")` records its graphs again.

    python reduce_overhead.py [--steps N] [--one-shape]
    lowtide run reduce_overhead.py [--steps N] [--one-shape]

Trains a transformer of two layers, with a second sequence length from step 11 on. Between the steps it allocates and
frees tensors of random sizes. Prints one JSON line: the steps in which a graph was recorded, those in which an address
changed, and the losses to the last bit. The addresses are those of the parameters, of the optimizer's state, and of
each length's input and output.

With --one-shape there is no second length. Then the exit code is 1 if after step 3 a graph is recorded or an address
changes, and if no graph is recorded at all.
"""

import argparse
import json
import random
import sys
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch._inductor import cudagraph_trees

DEVICE = "cuda"
# The first step warms up, and the second records. From the third on, graphs are replayed.
LAST_CHANGE = 3

# By kind and name.
Addresses = dict[tuple[str, object], int]


def main() -> int:
    """Runs the job and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30, metavar="N")
    parser.add_argument("--one-shape", action="store_true", help="keep the length; fail if anything changes")
    arguments = parser.parse_args()
    recorded, changed, losses = train(arguments.steps, arguments.one_shape)
    result = {"name": "reduce_overhead", "recorded_in_steps": recorded, "changed_in_steps": changed, "losses": losses}
    print(json.dumps(result | {"reserved_bytes": torch.cuda.max_memory_reserved()}), flush=True)
    is_stable = bool(recorded) and max([*recorded, *changed]) <= LAST_CHANGE
    return 1 if arguments.one_shape and not is_stable else 0


def train(steps: int, one_shape: bool) -> tuple[dict[int, int], dict[int, "Counter[str]"], list[str]]:
    """Returns how many graphs were recorded in which steps, how many addresses changed, and the losses."""
    torch.manual_seed(0)
    draw = random.Random(0)
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 2), nn.Linear(256, 1000)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    compiled = torch.compile(model, mode="reduce-overhead")
    inputs = {length: torch.empty(8, length, dtype=torch.int64, device=DEVICE) for length in (64, 96)}
    count, known = count_recordings(), Addresses()
    recorded, changed, losses = {}, {}, []
    kept: list[torch.Tensor] = []
    for step in range(1, steps + 1):
        count.clear()
        length = 64 if one_shape or step < 11 else [64, 96][step % 2]
        tokens = inputs[length].random_(0, 1000)
        torch.compiler.cudagraph_mark_step_begin()
        output = compiled(tokens)
        addresses: Addresses = {("input", length): tokens.data_ptr(), ("output", length): output.data_ptr()}
        loss = nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten())
        # Nothing of a step is alive in the next one.
        del output
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss).hex())
        if count.total():
            recorded[step] = count.total()
        if changes := count_changes(known, addresses | lasting_addresses(model, optimizer)):
            changed[step] = changes
        kept.append(torch.empty(int(2 ** draw.uniform(9, 25)), dtype=torch.uint8, device=DEVICE))
        if len(kept) > 8:
            del kept[draw.randrange(len(kept))]
    return recorded, changed, losses


def lasting_addresses(model: nn.Module, optimizer: torch.optim.Optimizer) -> Addresses:
    """Returns the addresses of the parameters and of the optimizer's state."""
    addresses: Addresses = {("parameter", name): tensor.data_ptr() for name, tensor in model.named_parameters()}
    for index, state in enumerate(optimizer.state.values()):
        addresses |= {("state", (index, name)): tensor.data_ptr() for name, tensor in state.items()}
    return addresses


def count_changes(known: Addresses, addresses: Addresses) -> "Counter[str]":
    """Counts by kind the addresses that are not those known, and makes them the known ones."""
    changed = Counter(key[0] for key, address in addresses.items() if known.get(key, address) != address)
    known.update(addresses)
    return changed


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
    sys.exit(main())
