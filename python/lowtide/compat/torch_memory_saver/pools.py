"""What stands for a region's memory: the other has a pool of PyTorch's there, and programs end it to be rid of both."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from ... import _regions

Key: TypeAlias = tuple[str, bool, bool, str, int]
"""What tells the other's pools apart: the tag, whether the backup is on the CPU, whether it is on disk, in which kind
of host memory ("" without one on the CPU), and the device."""


Pool: TypeAlias = tuple[Any, int]
"""A pool of PyTorch's, and on which device."""


class Route(threading.local):
    """Which pool of PyTorch's, and on which device, a thread's requests come from because it is in `disable`.

    Such a pool goes before every region, and the other's regions before what is around them.
    """

    def __init__(self) -> None:
        self._of: Pool | None = None
        self._context = ExitStack()

    @contextmanager
    def to(self, of: Pool | None) -> Iterator[None]:
        """While in it, they come from another, or from none."""
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
    """The pools of captures by the other's interface, where a pool may be of several regions, and of none in part.

    A pool of lowtide's is one region's: for each there is one, which stands for the one that the program named.
    """

    def __init__(self) -> None:
        self._own: dict[tuple[Any, ...], Any] = {}

    def find(self, pool: Any, tag: str, backup: "_regions.Backup | None") -> Any:
        """Returns the pool of a region that stands for a pool, or a new one for `None`."""
        import torch

        region = (tag, backup, torch.cuda.current_device())
        known = None if pool is None else self._own.get((tuple(pool), region))
        if known is not None:
            return known
        own = torch.cuda.graph_pool_handle()
        # What a graph says that was captured into it is it, too.
        for named in (own, pool):
            if named is not None:
                self._own[(tuple(named), region)] = own
        return own


class MemPool:
    """Stands for a region on a device. When nobody has it any more, what no block of the region uses goes back.

    Where that is all of it, its backup goes, too, retained or not, and a region that was paused is not any more.
    """

    def __init__(self, tag: str, backup: _regions.Backup | None, device: int) -> None:
        # Not at the end of the process, which gives back everything.
        weakref.finalize(self, _end, tag, backup, device).atexit = False


def _end(tag: str, backup: _regions.Backup | None, device: int) -> None:
    if _regions.trim(tag, backup, device) and backup == "host":
        # Else it would wait for another backup.
        _regions.release_idle_backups()
