"""A region that NCCL has registered, on every rank: leaves, comes back, and is reduced into as before.

    torchrun --nproc-per-node 2 -m lowtide run registered_ranks.py

with TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1, so that NCCL registers every segment. Each rank prints the
address of its buffer, and how often NCCL has to have registered it.
"""

import torch
import torch.distributed as dist

import lowtide

PAUSES = 5
MIB = 1 << 20
LENGTH = 16 * MIB


def free_bytes() -> int:
    """Returns what the card has left once every rank has done what it does."""
    torch.cuda.synchronize()
    dist.barrier()
    return int(torch.cuda.mem_get_info()[0])


def reduce(buffer: torch.Tensor, rank: int, ranks: int) -> None:
    """Has every rank add to the buffer, and checks the sum."""
    buffer.fill_(rank + 1)
    dist.all_reduce(buffer)
    assert bool((buffer == ranks * (ranks + 1) / 2).all())


def main() -> None:
    """Pauses and resumes."""
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    dist.all_reduce(torch.ones(1, device="cuda"))
    with lowtide.region("registered", "host"):
        buffer = torch.empty(LENGTH, device="cuda")
    reduce(buffer, rank, ranks)
    for number in range(PAUSES):
        noise = torch.rand(LENGTH, device="cuda", generator=torch.Generator("cuda").manual_seed(ranks * number + rank))
        buffer.copy_(noise)
        torch.cuda.empty_cache()
        before = free_bytes()
        lowtide.pause("registered")
        # What another rank still maps would stay. The first backup makes streams, which take 2 MiB for good.
        assert free_bytes() - before >= LENGTH * 4 - 2 * MIB
        dist.all_reduce(torch.full_like(noise, -1))
        torch.cuda.empty_cache()
        lowtide.resume("registered")
        assert torch.equal(buffer, noise)
        reduce(buffer, rank, ranks)
    print(f"buffer {buffer.data_ptr():#x} {1 + PAUSES}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
