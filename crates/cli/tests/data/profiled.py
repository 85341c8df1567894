"""A small training whose memory is recorded while PyTorch's profiler runs.

python profiled.py DIRECTORY
"""

import sys

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function


def step(model, optimizer, copies):
    inputs = torch.ones(4096, 256, device="cuda")
    with torch.cuda.stream(copies):
        torch.ones(1024, 1024, device="cuda")
    model(inputs).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main(directory):
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    copies = torch.cuda.Stream()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            with record_function("step"):
                step(model, optimizer, copies)
        try:
            torch.empty(1 << 40, device="cuda", dtype=torch.uint8)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    torch.cuda.memory._dump_snapshot(f"{directory}/profiled.pickle")
    profiler.export_chrome_trace(f"{directory}/profiled.json")


main(sys.argv[1])
