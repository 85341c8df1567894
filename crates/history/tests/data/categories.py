"""A small training that records its memory, and beside it the category of each storage, as the program knows it.

    python categories.py all|python|said plain|accumulate|checkpoint|autocast|sgd|late|generate|convolution DIRECTORY

With `said`, it runs on lowtide (`lowtide run`), which records without stacks what `lowtide.categorize` says.

Each entry of the JSON is the time in microseconds, a storage's address and size, and its category.
"""

import json
import sys
import time

import lowtide
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

MARKS = []
RECORDINGS = []


def mark(category, tensor):
    if tensor.device.type != "cuda":
        return
    storage = tensor.untyped_storage()
    MARKS.append([time.time_ns() // 1000, storage.data_ptr(), storage.nbytes(), category])


class Block(nn.Module):
    def __init__(self, width, recompute):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1) if not recompute else nn.Identity()

    def forward(self, x):
        q, k, v = self.query(self.norm(x)).chunk(3, dim=-1)
        x = x + torch.softmax(q @ k.transpose(1, 2) / 16.0, dim=-1) @ v
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, width=256, depth=2, recompute=False):
        super().__init__()
        self.embed = nn.Embedding(4000, width)
        self.blocks = nn.ModuleList(Block(width, recompute) for _ in range(depth))
        self.head = nn.Linear(width, 4000)
        self.recompute = recompute

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if self.recompute else block(x)
        return self.head(x)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)
        self.second = nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, 4000)

    def forward(self, images):
        x = F.relu(self.norm(self.first(images)))
        return self.head(F.relu(self.second(x)).mean(dim=(2, 3)))


def batch(kind):
    if kind == "convolution":
        return torch.randn(16, 3, 64, 64), torch.randint(0, 4000, (16,))
    tokens = torch.randint(0, 4000, (16, 128))
    return tokens, tokens


def train(model, optimizer, kind, steps):
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in owned and tensor.dtype != torch.int64:
            mark("activations", tensor)
        return tensor

    for buffer in model.buffers():
        mark("parameters", buffer)
        owned.add(buffer.untyped_storage().data_ptr())
    for parameter in model.parameters():
        mark("parameters", parameter)
        parameter.register_post_accumulate_grad_hook(lambda parameter: mark("gradients", parameter.grad))
    passes = 2 if kind == "accumulate" else 1
    for _ in range(steps):
        for _ in range(passes):
            inputs, targets = batch(kind)
            is_same = inputs is targets
            inputs = inputs.to("cuda")
            targets = inputs if is_same else targets.to("cuda")
            mark("inputs", inputs)
            mark("inputs", targets)
            owned.update(tensor.untyped_storage().data_ptr() for tensor in (inputs, targets))
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
                    out = model(inputs)
                    loss = F.cross_entropy(out.flatten(0, -2), targets.flatten())
            mark("activations", out)
            mark("activations", loss)
            loss.backward()
        optimizer.step()
        for state in optimizer.state.values():
            for value in state.values():
                if torch.is_tensor(value):
                    mark("optimizer_state", value)
        optimizer.zero_grad(set_to_none=True)


def grow_kv_cache(cache, keys):
    if cache is None:
        return keys
    grown = torch.cat([cache, keys], dim=1)
    mark("kv_cache", grown)
    return grown


@torch.no_grad()
def generate(model, tokens):
    for parameter in model.parameters():
        mark("parameters", parameter)
    cache = None
    for _ in range(tokens):
        token = torch.randint(0, 4000, (16, 1)).to("cuda")
        hidden = model.embed(token)
        cache = grow_kv_cache(cache, hidden)
        scores = model(token) + (hidden @ cache.transpose(1, 2)).sum()
        scores.argmax(dim=-1)


def main():
    stacks, kind, directory = sys.argv[1:]
    if kind != "late":
        record(stacks, kind, directory)
    torch.manual_seed(0)
    model = (Images() if kind == "convolution" else Model(recompute=kind == "checkpoint")).cuda()
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if stacks == "said":
        lowtide.categorize(model, optimizer)
    if kind == "generate":
        generate(model, 40)
        return save(directory, kind, stacks)
    if kind == "late":
        train(model, optimizer, kind, 2)
        record(stacks, kind, directory)
        MARKS.clear()
    train(model, optimizer, kind, 3)
    save(directory, kind, stacks)


def record(stacks, kind, directory):
    if stacks == "said":
        RECORDINGS.append(lowtide.record(f"{directory}/{kind}.said.lowtide"))
    else:
        torch.cuda.memory._record_memory_history(stacks=stacks)


def save(directory, kind, stacks):
    for recording in RECORDINGS:
        recording.stop()
    if not RECORDINGS:
        torch.cuda.memory._dump_snapshot(f"{directory}/{kind}.{stacks}.pickle")
    with open(f"{directory}/{kind}.{stacks}.json", "w") as file:
        json.dump(MARKS, file)


main()
