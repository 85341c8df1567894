"""Real PyTorch jobs, each of which loads an allocator in its own way. They know nothing of lowtide.

    python jobs.py NAME [--steps N] [--exact] [--memory BYTES]
    lowtide run jobs.py NAME [--steps N] [--exact] [--memory BYTES]

Prints one JSON line: peaks of memory, calls to the driver, the time of each step and the median, and the losses.
`--exact` asks PyTorch for deterministic kernels, so that the losses of two runs may be compared bit for
bit; without it two runs of one job differ in the last digits, whatever the allocator. `--memory` is the most that
the allocator may reserve.
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


def gpt2_train(batch: int = 8) -> tuple[Step, int]:
    """GPT-2 of 12 layers, in mixed precision, every step of the same shape."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device(DEVICE):
        model = GPT2LMHeadModel(GPT2Config(n_layer=12))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(_: int) -> torch.Tensor:
        tokens = torch.randint(0, 50000, (batch, 1024), device=DEVICE)
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


def llama_varlen(longest: int = 4096) -> tuple[Step, int]:
    """A Llama whose every step has another length, with activations computed again."""
    model = llama(2048, 16, 16)
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    draw = random.Random(1)

    def step(_: int) -> torch.Tensor:
        shape = draw.choice([1, 2, 3, 4]), draw.randrange(200, longest)
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


def rlhf(longest: int = 700) -> tuple[Step, int]:
    """A policy writes answers, a frozen reference scores them, and the policy learns from the scores."""
    policy, reference = llama(1024, 12, 8), llama(1024, 12, 8).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-5)
    draw = random.Random(4)

    def score(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=tokens[:, :-1]).logits.float()
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)

    def step(_: int) -> torch.Tensor:
        shape = draw.choice([4, 8, 16]), draw.randrange(32, longest)
        prompt = torch.randint(0, 32000, shape, device=DEVICE)
        with torch.no_grad():
            policy.eval()
            tokens = policy.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
            reward = score(reference, tokens).sum(-1) / 1000
        policy.train()
        for part in tokens.split(4):
            optimizer.zero_grad(set_to_none=True)
            loss = -(score(policy, part).mean(-1) * reward[: len(part)]).mean()
            loss.backward()
            optimizer.step()
        return loss

    return step, 24


class Experts(nn.Module):  # type: ignore[misc]
    """Eight feed-forward networks, of which each token uses two."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, 8, bias=False)
        networks = [(nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)) for _ in range(8)]
        self.experts = nn.ModuleList(nn.Sequential(up, nn.SiLU(), down) for up, down in networks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            out.index_add_(0, rows, expert(tokens[rows]) * weights[rows, place, None])
        return x + out.view_as(x)


def mixtral_moe() -> tuple[Step, int]:
    """A mixture of experts, whose batches for each expert have other sizes in each step."""
    with torch.device(DEVICE):
        layers: list[nn.Module] = []
        for _ in range(8):
            layers += [nn.TransformerEncoderLayer(1024, 16, 1024, 0.0, batch_first=True), Experts(1024)]
        model = nn.Sequential(nn.Embedding(32000, 1024), *layers, nn.Linear(1024, 32000)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=True)
    draw = random.Random(5)

    def step(_: int) -> torch.Tensor:
        tokens = torch.randint(0, 32000, (4, draw.randrange(256, 1024)), device=DEVICE)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step, 40


def bert_dynpad() -> tuple[Step, int]:
    """BERT, whose batches are padded to their longest text."""
    from transformers import BertConfig, BertForMaskedLM

    with torch.device(DEVICE):
        model = BertForMaskedLM(BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=True)
    draw = random.Random(6)

    def step(_: int) -> torch.Tensor:
        lengths = torch.tensor([min(512, int(draw.lognormvariate(4.6, 0.6)) + 8) for _ in range(32)])
        length = int(lengths.max())
        tokens = torch.randint(0, 30000, (32, length), device=DEVICE)
        mask = (torch.arange(length) < lengths[:, None]).to(DEVICE)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(~mask, -100)).loss
        loss.backward()
        optimizer.step()
        return loss

    return step, 60


def gnn() -> tuple[Step, int]:
    """Messages along the edges of graphs of any size."""
    with torch.device(DEVICE):
        layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
    optimizer = torch.optim.Adam(layers.parameters())
    draw = random.Random(7)

    def step(_: int) -> torch.Tensor:
        nodes = draw.randrange(10_000, 120_000)
        edges = torch.randint(0, nodes, (2, nodes * draw.randrange(3, 9)), device=DEVICE)
        x = target = torch.randn(nodes, 256, device=DEVICE)
        optimizer.zero_grad(set_to_none=True)
        for layer in layers:
            messages = F.relu(layer(x))[edges[0]]
            x = x + torch.zeros_like(x).index_add(0, edges[1], messages)
        loss = F.mse_loss(x, target)
        loss.backward()
        optimizer.step()
        return loss

    return step, 60


def vit_streams() -> tuple[Step, int]:
    """A vision transformer; another stream brings and changes the next pictures, a third averages the weights."""
    import torchvision

    model = torchvision.models.vit_b_16().to(DEVICE)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=True)
    loading, averaging = torch.cuda.Stream(), torch.cuda.Stream()
    draw = random.Random(8)

    def load() -> torch.Tensor:
        host = torch.rand(draw.choice([16, 24, 32, 48, 64]), 3, 256, 256).pin_memory()
        with torch.cuda.stream(loading):
            x = host.to(DEVICE, non_blocking=True)
            return F.interpolate(x.flip(-1) * 2 - 1, size=224, mode="nearest")

    batch = load()

    def step(_: int) -> torch.Tensor:
        nonlocal batch
        now = torch.cuda.current_stream()
        now.wait_stream(loading)
        x, batch = batch, load()
        x.record_stream(now)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), torch.arange(len(x), device=DEVICE))
        loss.backward()
        now.wait_stream(averaging)
        optimizer.step()
        averaging.wait_stream(now)
        with torch.cuda.stream(averaging):
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.lerp_(parameter.detach().float() * 1.0, 0.01)
        return loss

    return step, 60


def graphs() -> tuple[Step, int]:
    """A Llama that answers from graphs of six batch sizes, which share a pool, between steps without graphs."""
    model = llama(1024, 12, 8).eval().requires_grad_(False)
    recorded: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
    pool = torch.cuda.graph_pool_handle()
    draw = random.Random(9)

    def record(count: int) -> None:
        tokens = torch.zeros(count, 128, dtype=torch.long, device=DEVICE)
        with torch.cuda.stream(torch.cuda.Stream()):
            model(input_ids=tokens, use_cache=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = model(input_ids=tokens, use_cache=False).logits
        recorded[count] = graph, tokens, logits

    @torch.no_grad()
    def step(index: int) -> torch.Tensor:
        if index == 0:
            for count in (32, 16, 8, 4, 2, 1):
                record(count)
        graph, tokens, logits = recorded[draw.choice([1, 2, 4, 8, 16, 32])]
        tokens.copy_(torch.randint(0, 32000, tokens.shape, device=DEVICE))
        graph.replay()
        best = logits.float().log_softmax(-1).amax(-1).mean()
        prompt = torch.randint(0, 32000, (draw.randrange(1, 24), draw.randrange(16, 512)), device=DEVICE)
        return best + model(input_ids=prompt, use_cache=False).logits.float().mean()

    return step, 120


ALL = (
    mnist_mlp, gpt2_train, llama_varlen, resnet_multiscale, llama_generate, rlhf, mixtral_moe, bert_dynpad, gnn,
    vit_streams, graphs,
)  # fmt: skip
JOBS = {job.__name__: job for job in ALL}


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
    parser.add_argument("--memory", type=int, metavar="BYTES")
    parser.add_argument("--label", default="")
    arguments = parser.parse_args()
    if arguments.memory:
        torch.cuda.set_per_process_memory_fraction(arguments.memory / torch.cuda.mem_get_info()[1])
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
        result |= {"steps_ms": [round(second * 1e3, 3) for second in seconds]}
    except torch.OutOfMemoryError as error:
        result |= {"completed": False, "error": str(error).splitlines()[0]}
    print(json.dumps(result | figures()), flush=True)


if __name__ == "__main__":
    main()
