"""Records the small job whose snapshot is here in the forms that PyTorch and its users write.

    python3 fakeruntime/run.py 2.15.0 crates/trace/tests/data/record.py

from the root of the repository, with 2.8.0 and 2.11.0, too. The files are named after the release.
"""

import json
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch.cuda import _memory_viz as viz

KIB = 1 << 10
VERSION = ".".join(torch.__version__.split(".")[:2])
HAS_HOST = VERSION == "2.15"


def path(form: str) -> Path:
    """Returns where a form goes."""
    return Path(__file__).parent / f"torch{VERSION}.{form}"


def step() -> torch.Tensor:
    """Copies a batch to the card and leaves a result there."""
    batch = torch.empty(300 * KIB, dtype=torch.uint8, pin_memory=HAS_HOST)
    on_card = batch.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    return torch.empty_like(on_card)


def shorten(value: Any) -> None:
    """Names files without their directories, which differ from machine to machine."""
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            shorten(item)
    if isinstance(value, dict) and "filename" in value:
        value["filename"] = Path(value["filename"]).name


def snapshot(**options: Any) -> dict[str, Any]:
    """Returns what is recorded of three steps."""
    memory = torch.cuda.memory
    torch.cuda.empty_cache()
    memory._record_memory_history(context="alloc", stacks="python", clear_history=True, **options)
    results = [step() for _ in range(3)]
    recorded = memory._snapshot()
    memory._record_memory_history(None)
    del results
    shorten(recorded)
    return recorded


torch.empty(1, device="cuda")
job = snapshot(**({"record_pinned_host_memory": True} if HAS_HOST else {}))
path("pickle").write_bytes(pickle.dumps(job))
path("json").write_text(json.dumps(job))
path("page.html").write_text(viz.trace_plot(job))
torch.save(job, path("pt"))
torch.save(job, path("old.pt"), _use_new_zipfile_serialization=False)
stats = torch.cuda.memory_stats()
added = {"version": torch.__version__, "size": torch.Size([2, 3]), "device": torch.device("cuda", 0)}
path("added.pickle").write_bytes(pickle.dumps({**job, "stats": OrderedDict(stats), **added}))
if VERSION != "2.8":
    skipped = snapshot(skip_actions=["free_requested", "free_completed"])
    path("no_frees.pickle").write_bytes(pickle.dumps(skipped))
if HAS_HOST:
    early = torch.empty(3, dtype=torch.uint8, pin_memory=True)
    torch.cuda.memory._record_memory_history(context=None, record_pinned_host_memory=True, clear_history=True)
    del early
    later = torch.empty(4, dtype=torch.uint8, pin_memory=True)
    path("begun_late.pickle").write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
