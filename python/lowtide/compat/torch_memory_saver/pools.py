"""What stands for a region's memory: the other has a pool of PyTorch's there, and programs end it to be rid of both."""

import weakref
from typing import TypeAlias

from ... import _regions

Key: TypeAlias = tuple[str, bool, bool, str, int]
"""What tells the other's pools apart: the tag, whether the backup is on the CPU, whether it is on disk, in which kind
of host memory ("" without one on the CPU), and the device."""


class MemPool:
    """Stands for a region on a device. When nobody has it any more, what no block of the region uses goes back.

    Where that is all of it, its backup goes, too, retained or not, and a region that was paused is not any more.
    """

    def __init__(self, tag: str, backup: _regions.Backup | None, device: int) -> None:
        # Not at the end of the process, which gives back everything.
        weakref.finalize(self, _end, tag, backup, device).atexit = False


def _end(tag: str, backup: _regions.Backup | None, device: int) -> None:
    _regions.trim(tag, backup, device)
    if backup == "host":
        # Else it would wait for another backup.
        _regions.release_idle_backups()
