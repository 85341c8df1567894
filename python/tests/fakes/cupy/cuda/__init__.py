"""`cupy.cuda`."""

from collections.abc import Callable
from types import SimpleNamespace

from . import memory as memory

stream = SimpleNamespace(ptr=0)


def get_current_stream() -> SimpleNamespace:
    return stream


def set_allocator(malloc: Callable[[int], memory.Memory]) -> None:
    global _malloc
    _malloc = malloc


def alloc(size: int) -> memory.Memory:
    assert _malloc is not None
    return _malloc(size)


_malloc: Callable[[int], memory.Memory] | None = None
