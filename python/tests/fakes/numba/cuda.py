"""`numba.cuda`: the interface for external memory."""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple


class Context:
    """A device's context that counts how often the device was waited for."""

    def __init__(self) -> None:
        self.device = SimpleNamespace(id=0)
        self.waits = 0
        assert chosen is not None
        self.memory_manager = chosen(context=self)
        self.memory_manager.initialize()

    def synchronize(self) -> None:
        self.waits += 1


class MemoryInfo(NamedTuple):
    free: int
    total: int


class MemoryPointer:
    """Memory that is freed with the last reference to this."""

    def __init__(self, context: Context, pointer: object, size: int, finalizer: Callable[[], None]) -> None:
        self.context, self.device_pointer, self.size = context, pointer, size
        weakref.finalize(self, finalizer)


class Deallocations:
    """Frees to come: at most two wait, and none that would pass a fifth of the device."""

    def __init__(self) -> None:
        self.memory_capacity = 0
        self.is_disabled = False
        self.items: deque[tuple[Callable[[object], None], object, int]] = deque()

    def add_item(self, release: Callable[[object], None], handle: object, size: int) -> None:
        self.items.append((release, handle, size))
        if len(self.items) > 2 or sum(size for _, _, size in self.items) > self.memory_capacity / 5:
            self.clear()

    def clear(self) -> None:
        while self.items and not self.is_disabled:
            release, handle, _ = self.items.popleft()
            release(handle)


class GetIpcHandleMixin:
    pass


class HostOnlyCUDAMemoryManager:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.deallocations = Deallocations()

    def reset(self) -> None:
        self.deallocations.clear()

    @contextlib.contextmanager
    def defer_cleanup(self) -> Iterator[None]:
        self.deallocations.is_disabled = True
        yield
        self.deallocations.is_disabled = False


chosen: Callable[..., Any] | None = None


def set_memory_manager(manager: Callable[..., Any]) -> None:
    global chosen
    chosen = manager
