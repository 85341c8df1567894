"""Real PyTorch jobs, each of which loads an allocator in its own way. They know nothing of lowtide.

    python jobs.py NAME [--steps N] [--exact]
    python -m lowtide run jobs.py NAME [--steps N] [--exact]

Prints one JSON line: peaks of memory, calls to the driver, the median time of a step, and the losses.
`--exact` asks PyTorch for deterministic kernels, so that the losses of two runs may be compared bit for
bit; without it two runs of one job differ in the last digits, whatever the allocator.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable

# Before CUDA starts: cuBLAS is deterministic only with a workspace of a fixed size.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.nn.functional as F
from torch import nn

DEVICE = "cuda"
GIB = 2**30
Step = Callable[[int], torch.Tensor]


def mnist_mlp() -> tuple[Step, int]:
    """A small convolutional network on 28 x 28 pictures, with an evaluation every hundred steps."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    ).to(DEVICE)  # fmt: skip
    optimizer = torch.optim.Adadelta(model.parameters())
    pictures, digits = torch.rand(6000, 1, 28, 28), torch.randint(0, 10, (6000,))

    def step(index: int) -> torch.Tensor:
        first = index * 64 % 5900
        x, y = pictures[first : first + 64].to(DEVICE), digits[first : first + 64].to(DEVICE)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if index % 100 == 99:
            evaluate()
        return loss

    @torch.no_grad()
    def evaluate() -> None:
        model.eval()
        model(pictures[:1000].to(DEVICE)).argmax(1)
        model.train()

    return step, 938


def gpt2_train() -> tuple[Step, int]:
    """GPT-2 of 12 layers, in mixed precision, every step of the same shape."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device(DEVICE):
        model = GPT2LMHeadModel(GPT2Config(n_layer=12))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(_: int) -> torch.Tensor:
        tokens = torch.randint(0, 50000, (8, 1024), device=DEVICE)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss

    return step, 30


def llama(hidden: int, layers: int, heads: int) -> nn.Module:
    """A Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        vocab_size=32000,
        max_position_embeddings=8192,
    )
    with torch.device(DEVICE):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def llama_varlen() -> tuple[Step, int]:
    """A Llama whose every step has another length, with activations computed again."""
    model = llama(2048, 16, 16)
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    draw = random.Random(1)

    def step(_: int) -> torch.Tensor:
        shape = draw.choice([1, 2, 3, 4]), draw.randrange(200, 4096)
        tokens = torch.randint(0, 32000, shape, device=DEVICE)
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss

    return step, 60


def resnet_multiscale() -> tuple[Step, int]:
    """A ResNet-50 on pictures of many sizes."""
    import torchvision

    model = torchvision.models.resnet50().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    draw = random.Random(2)

    def step(_: int) -> torch.Tensor:
        side, count = draw.choice(range(160, 512, 32)), draw.choice([16, 24, 32, 48])
        x = torch.rand(count, 3, side, side, device=DEVICE)
        y = torch.randint(0, 1000, (count,), device=DEVICE)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, 80


def llama_generate() -> tuple[Step, int]:
    """Text from prompts of many lengths; caches grow by concatenation."""
    model = llama(1024, 16, 16).eval()
    draw = random.Random(3)

    @torch.no_grad()
    def step(_: int) -> torch.Tensor:
        shape = draw.choice([1, 4, 8, 16]), draw.randrange(16, 1500)
        prompt = torch.randint(0, 32000, shape, device=DEVICE)
        tokens = model.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)
        return tokens.sum()

    return step, 16


JOBS = {job.__name__: job for job in (mnist_mlp, gpt2_train, llama_varlen, resnet_multiscale, llama_generate)}


def run(step: Step, steps: int) -> tuple[list[float], list[str]]:
    """Returns the seconds that each step took, and what it computed, to the last bit."""
    seconds, losses = [], []
    for index in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step(index)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss).hex())
    return seconds, losses


def figures() -> dict[str, object]:
    """What PyTorch says of the memory that the job took."""
    stats = torch.cuda.memory_stats()
    return {
        "allocated_bytes_peak": stats["allocated_bytes.all.peak"],
        "requested_bytes_peak": stats["requested_bytes.all.peak"],
        "reserved_bytes_peak": stats["reserved_bytes.all.peak"],
        "reserved_ratio": round(stats["reserved_bytes.all.peak"] / stats["allocated_bytes.all.peak"], 4),
        "allocs": stats["allocation.all.allocated"],
        "device_allocs": stats["num_device_alloc"],
        "device_frees": stats["num_device_free"],
        "retries": stats["num_alloc_retries"],
        "ooms": stats["num_ooms"],
    }


def main() -> None:
    """Runs one job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=JOBS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--label", default="")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    if arguments.exact:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        # The other kernels for attention add up in whatever order their parts end.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    step, steps = JOBS[arguments.name]()
    result: dict[str, object] = {"name": arguments.name, "label": arguments.label, "exact": arguments.exact}
    try:
        seconds, losses = run(step, arguments.steps or steps)
        result |= {"completed": True, "steps": len(seconds), "step_ms": statistics.median(seconds) * 1e3}
        result |= {"total_s": sum(seconds), "losses": losses}
    except torch.OutOfMemoryError as error:
        result |= {"completed": False, "error": str(error).splitlines()[0]}
    print(json.dumps(result | figures()), flush=True)


if __name__ == "__main__":
    main()
