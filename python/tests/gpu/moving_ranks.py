"""Reductions into memory of the default pool while blocks of random sizes come and go, on every rank.

    torchrun --nproc-per-node 2 -m lowtide run moving_ranks.py

Each rank checks every sum, and prints how often memory was unmapped meanwhile. lowtide must turn off
TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1: with it, NCCL would register what exists when its communicator is made.
"""

import random

import torch
import torch.distributed as dist

STEPS = 400
HELD_MAX = 12
MIB = 1 << 20


def main() -> None:
    """Reduces into new tensors, and again into old ones before they are freed."""
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    # Every rank draws the same sizes.
    draw = random.Random(0)
    # Before the communicator is made.
    held = [torch.empty(draw.randrange(1, 16 * MIB), dtype=torch.int32, device="cuda") for _ in range(HELD_MAX)]
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.memory._record_memory_history("all", context=None)
    wrong = torch.zeros((), dtype=torch.long, device="cuda")

    def reduce(tensor: torch.Tensor, number: int) -> None:
        tensor.fill_(rank + number)
        dist.all_reduce(tensor)
        wrong.add_((tensor != ranks * number + ranks * (ranks - 1) // 2).sum())

    for step in range(STEPS):
        tensor = torch.empty(draw.randrange(1, 16 * MIB), dtype=torch.int32, device="cuda")
        reduce(tensor, step)
        held.append(tensor)
        if len(held) > HELD_MAX:
            old = held.pop(draw.randrange(len(held)))
            reduce(old, step + 1)
            del old
    del tensor
    assert int(wrong) == 0, f"{int(wrong)} numbers are wrong"
    events = torch.cuda.memory._snapshot()["device_traces"][rank]
    unmapped = sum(event["action"] == "segment_unmap" for event in events)
    print(f"unmapped {unmapped}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
