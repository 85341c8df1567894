"""`lowtide.categorize` and `run --categories`: what recordings say memory is for, beside the tensors themselves."""

import gc
import json
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide._report import find_command

torch = pytest.importorskip("torch")

from gpu_helpers import on_lowtide, version  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

pytestmark = on_lowtide


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 256)
        self.blocks = nn.ModuleList(Block(256) for _ in range(3))
        self.register_buffer("scale", torch.ones(777))
        self.head = nn.Linear(256, 1000)
        self.recompute = recompute

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def held(tensors: Iterable[Any]) -> int:
    """Returns the bytes of tensors' storages, each rounded up to 512 as live bytes are."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.is_cuda and storage.nbytes() > 0:
            storages[storage.data_ptr()] = -(-storage.nbytes() // 512) * 512
    return sum(storages.values())


def train(model: Any, optimizer: Any, steps: int) -> dict[str, int]:
    """Trains. The last step has its peak before its backward pass. Returns what the tensors hold then, by category."""
    known: dict[str, int] = {}
    for step in range(steps):
        tokens = torch.randint(0, 1000, (16, 64)).cuda()
        saved: list[Any] = []

        def pack(tensor: Any, saved: list[Any] = saved) -> Any:
            saved.append(tensor.detach())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            scores = model(tokens)
            loss = functional.cross_entropy(scores.flatten(0, -2), tokens.flatten())
        if step == steps - 1:
            parameters = [*model.parameters(), *model.buffers()]
            known["parameters"] = held(parameters)
            known["gradients"] = held(parameter.grad for parameter in model.parameters())
            values = (value for state in optimizer.state.values() for value in state.values())
            known["optimizer_state"] = held(value for value in values if torch.is_tensor(value))
            known["inputs"] = held([tokens])
            others = held([*parameters, tokens])
            known["activations"] = held([*parameters, tokens, *saved, scores, loss]) - others
            torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        del saved, pack
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return known


def summary(path: Path) -> Any:
    done = subprocess.run([find_command(), "summary", "--json", path], capture_output=True, text=True, check=True)
    (found,) = json.loads(done.stdout)
    return found


def check(found: Any, known: dict[str, int]) -> None:
    categories = {name: kept["bytes"] for name, kept in found["categories"].items()}
    for name in ("parameters", "gradients", "optimizer_state", "inputs"):
        assert categories[name] == known[name], (name, categories, known)
    activations = known["activations"]
    assert abs(categories["activations"] - activations) <= activations / 100, (categories, known)
    assert categories["unknown"] == 0, categories


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("is_before", [False, True])
def test_categories_are_those_of_the_tensors(tmp_path: Path, recompute: bool, is_before: bool) -> None:
    path = tmp_path / "said.lowtide"
    model = Model(recompute).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 2)
    if is_before:
        handle = lowtide.categorize(model, optimizer)
        train(model, optimizer, 1)
    with lowtide.record(path):
        if not is_before:
            handle = lowtide.categorize(model, optimizer)
        known = train(model, optimizer, 4)
    handle.remove()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    found = summary(path)
    check(found, known)
    by_path = {module["path"]: module["bytes"] for module in found["modules"]}
    linear = 4 * held([model.blocks[0].up.weight])
    assert by_path["blocks.*.up"] >= 3 * linear, by_path


def test_what_torch_compile_compiled_works_with_hooks(tmp_path: Path) -> None:
    model = Model().cuda()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = lowtide.categorize(compiled, optimizer)
    with lowtide.record(tmp_path / "compiled.lowtide"):
        train(compiled, optimizer, 4)
    handle.remove()
    categories = summary(tmp_path / "compiled.lowtide")["categories"]
    assert categories["parameters"]["bytes"] == held([*model.parameters(), *model.buffers()])
    assert categories["optimizer_state"]["bytes"] == held(model.parameters())


def test_a_step_that_raises_leaves_nothing_behind(tmp_path: Path) -> None:
    class Failing(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            raise ValueError("no such layer")

    model = nn.Sequential(nn.Linear(64, 64), Failing()).cuda()
    handle = lowtide.categorize(model)
    with lowtide.record(tmp_path / "raised.lowtide"):
        with pytest.raises(ValueError, match="no such layer"):
            model(torch.ones(4, 64, device="cuda"))
        kept = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
    handle.remove()
    modules = {module["path"]: module["bytes"] for module in summary(tmp_path / "raised.lowtide")["modules"]}
    assert modules[""] >= kept.nbytes, modules


@pytest.mark.parametrize("is_named", [False, True])
def test_a_model_that_is_dropped_is_freed(tmp_path: Path, is_named: bool) -> None:
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = lowtide.categorize(model, optimizer)
    with lowtide.record(tmp_path / "dropped.lowtide"):
        train(model, optimizer, 2)
    weight = weakref.ref(model.head.weight)
    if not is_named:
        del handle
    del model, optimizer
    gc.collect()
    assert weight() is None


def test_an_error_of_a_hook_ends_the_categories_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no address")

    monkeypatch.setattr(lowtide.Categorization, "_annotate", fail)
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lowtide.categorize(model, optimizer)
    with lowtide.record(tmp_path / "failed.lowtide"):
        train(model, optimizer, 2)
    text = "lowtide: the program goes on, but its memory is not categorized: no address"
    assert [line for line in capfd.readouterr().err.splitlines() if "categorized" in line] == [text]


SCRIPT = """
    import sys, torch
    from torch import nn

    model = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        out = model(torch.randn(64, 1024).cuda())
        out.float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_script_needs_no_change(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    path = tmp_path / "job.lowtide"
    environment = {**os.environ, "LOWTIDE_RECORD": str(path)}
    command = [sys.executable, "-m", "lowtide", "run", "--categories", "train.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    found = summary(path)
    weights = 4 * (2 * 1024 * 2048 + 2048 + 1024)
    assert found["categories"]["parameters"]["bytes"] == weights
    assert found["categories"]["optimizer_state"]["bytes"] == 2 * weights
    assert {module["path"] for module in found["modules"]} >= {"*", ""}


@pytest.mark.skipif(version() < (2, 14), reason="annotations of memory came with PyTorch 2.14")
def test_the_history_of_pytorch_has_them_too(tmp_path: Path) -> None:
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.cuda.memory._record_memory_history(context=None)
    handle = lowtide.categorize(model, optimizer)
    known = train(model, optimizer, 4)
    handle.remove()
    torch.cuda.memory._dump_snapshot(str(tmp_path / "history.pickle"))
    check(summary(tmp_path / "history.pickle"), known)


def test_without_lowtide_and_annotations_it_says_what_is_needed() -> None:
    program = "import torch, lowtide; lowtide.categorize(torch.nn.Linear(2, 2))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if version() < (2, 14):
        assert "lowtide.Error: categories need PyTorch on lowtide" in done.stderr.replace("_errors.", "")
    else:
        assert done.returncode == 0, done.stderr
