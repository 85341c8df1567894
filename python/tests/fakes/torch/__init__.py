"""As much of PyTorch as installing an allocator needs, with no CUDA behind it.

The environment says which PyTorch it is: `FAKE_TORCH_VERSION`, `FAKE_TORCH_CUDA` (empty: built without),
`FAKE_TORCH_CARDS` (how many it sees), `FAKE_TORCH_STARTED` (CUDA is in use) and `FAKE_TORCH_IN_USE` (only its C++
knows that it is).
"""

import os
from types import SimpleNamespace

from . import cuda as cuda

__version__ = os.environ.get("FAKE_TORCH_VERSION", "2.11.0+cu130")
version = SimpleNamespace(cuda=os.environ.get("FAKE_TORCH_CUDA", "13.0") or None, git_version="0")


def compiled_with_cxx11_abi() -> bool:
    return True


def device(named: "str | SimpleNamespace") -> SimpleNamespace:
    if isinstance(named, SimpleNamespace):
        return named
    kind, _, index = named.partition(":")
    return SimpleNamespace(type=kind, index=int(index) if index else None)
