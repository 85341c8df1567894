"""Objects in place of the original's PyTorch pools, which programs delete to free a region."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from ... import _regions

Key: TypeAlias = tuple[str, bool, bool, str, int]
"""The key of the original's pools: the tag, whether the backup is on the CPU, whether it is on disk, its kind of host
memory ("" without a backup on the CPU), and the device."""


Pool: TypeAlias = tuple[Any, int]
"""A pool of PyTorch, and its device."""


class Route(threading.local):
    """The pool of PyTorch that serves a thread's requests in `disable`, and its device.

    Such a pool takes precedence over every region. The original's inner regions take precedence over outer contexts.
    """

    def __init__(self) -> None:
        self._of: Pool | None = None
        self._context = ExitStack()

    @contextmanager
    def to(self, of: Pool | None) -> Iterator[None]:
        """A context in which the requests come from another pool, or from none."""
        before = self._of
        try:
            self._set(of)
            yield
        finally:
            self._set(before)

    def _set(self, of: Pool | None) -> None:
        if of is self._of:
            return
        import torch

        self._of = None
        self._context.close()
        if of is not None:
            self._context.enter_context(torch.cuda.use_mem_pool(*of))
            self._of = of


class GraphPools:
    """The pools of captures in the original's interface, where several regions may share a pool.

    A pool of lowtide belongs to one region, so each region has its own pool in place of the program's.
    """

    def __init__(self) -> None:
        self._own: dict[tuple[Any, ...], Any] = {}

    def find(self, pool: Any, tag: str, backup: "_regions.Backup | None") -> Any:
        """Returns a region's own pool in place of `pool`, or a new pool for `None`."""
        import torch

        region = (tag, backup, torch.cuda.current_device())
        known = None if pool is None else self._own.get((tuple(pool), region))
        if known is not None:
            return known
        own = torch.cuda.graph_pool_handle()
        # `graph.pool()` returns the own pool: it stands for itself, too.
        for named in (own, pool):
            if named is not None:
                self._own[(tuple(named), region)] = own
        return own


class MemPool:
    """An object for a region on a device. When it is deleted, the region's memory that no block uses is released.

    If that is all of it, its backup is released, too, retained or not, and the region is not paused any more.
    """

    def __init__(self, tag: str, backup: _regions.Backup | None, device: int) -> None:
        # Do nothing at the end of the process, which frees everything.
        weakref.finalize(self, _end, tag, backup, device).atexit = False


def _end(tag: str, backup: _regions.Backup | None, device: int) -> None:
    if _regions.trim(tag, backup, device) and backup == "host":
        # Otherwise its host memory would be kept for the next backup.
        _regions.release_idle_backups()
