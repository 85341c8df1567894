"""What lowtide holds and for whom."""

import ctypes
import os
import pickle
import sys
from typing import Any

from ._files import write
from ._library import MemoryStat, Status, check, library
from ._regions import kept_host_bytes, region_stats, regions
from ._show import MemoryStats

Device = int | str | Any
"""A device as PyTorch takes it: a number, a text like `"cuda:1"`, or a `torch.device`."""


def memory_stats(device: Device | None = None) -> MemoryStats:
    """Returns what `torch.cuda.memory_stats` says, under the same keys: bytes and counts.

    With them are the figures of each region, under keys like `region.kv_cache.paused_bytes`, and how fast its contents
    were copied, like `region.kv_cache.saved_bytes_per_second`; `regions` has them one by one, and says what they are.
    `kept_host_bytes` is the host's memory that a resume has left for the next pause of any region of the device.

    `None` is PyTorch's current device. Asking for a device that is not in use starts neither it nor the driver;
    until something does, any number is one's. In a notebook the answer shows itself as a table.
    """
    function = library().lowtide_memory_stats
    number = _number(device)
    room = ctypes.c_size_t()
    status = function(number, None, 0, ctypes.byref(room))
    while status == Status.TOO_SMALL:
        # A pool that another thread makes in between takes more room.
        stats = (MemoryStat * room.value)()
        status = function(number, stats, len(stats), ctypes.byref(room))
    check(status)
    kept = {"kept_host_bytes": kept_host_bytes(number)}
    return MemoryStats({stat.key.decode(): stat.value for stat in stats[: room.value]} | region_stats(number) | kept)


def snapshot() -> Any:
    """Returns every segment and block of the devices in use, as `torch.cuda.memory._snapshot` does.

    It has no history: PyTorch's function has, where lowtide stands behind it. Under `regions` it has what
    the function of that name returns, and, if there are any, under `region_pools` which pools have the memory of
    regions, and under `pauses` the segments that are paused.
    """
    return {**pickle.loads(_snapshot_pickle()), "regions": regions()}


def dump_snapshot(path: str | os.PathLike[str] = "dump_snapshot.pickle") -> None:
    """Writes `snapshot()` to a file of this user alone, for `lowtide` and for PyTorch's viewer, pytorch.org/memory_viz.

    Replaces a regular file of this user, and raises `OSError` where anything else is there.
    """
    write(path, pickle.dumps(snapshot()))


def empty_cache() -> None:
    """Releases everything that is not in use to the driver, on every device."""
    check(library().lowtide_empty_cache(-1))


def version() -> str:
    """Returns lowtide's version, like `"0.1.0"`."""
    text: bytes = library().lowtide_version()
    return text.decode()


def _snapshot_pickle() -> bytes:
    memory, length = ctypes.c_void_p(), ctypes.c_size_t()
    check(library().lowtide_snapshot(ctypes.byref(memory), ctypes.byref(length)))
    try:
        return ctypes.string_at(memory, length.value)
    finally:
        library().lowtide_release_bytes(memory)


def _number(device: Device | None) -> int:
    if isinstance(device, int):
        # Of a number that is too large C would see a part.
        if device.bit_length() >= 8 * ctypes.sizeof(ctypes.c_int):
            raise ValueError(f"there is no device {device}")
        return device
    torch = sys.modules.get("torch")
    if torch is None:
        if device is None:
            return 0
        raise TypeError(f"a device is a number while PyTorch is not imported, not {device!r}")
    if device is not None:
        named = torch.device(device)
        if named.type != "cuda":
            raise ValueError(f"a device of CUDA is expected, and this is {named}")
        if named.index is not None:
            return int(named.index)
    return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else 0
