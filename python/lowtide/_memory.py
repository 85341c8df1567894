"""Memory statistics and snapshots."""

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
    """Returns the figures of `torch.cuda.memory_stats`, under the same keys: bytes and counts.

    They include each region's figures, under keys like `region.kv_cache.paused_bytes`, and its copy speeds, like
    `region.kv_cache.saved_bytes_per_second`; `regions` documents them. `kept_host_bytes` is the host memory that a
    resume keeps for the next pause of any region of the device.

    `None` is PyTorch's current device. The call starts neither the device nor the driver; before the driver has
    started, any device number is accepted. In a notebook, the result is shown as a table.
    """
    function = library().lowtide_memory_stats
    number = _number(device)
    room = ctypes.c_size_t()
    status = function(number, None, 0, ctypes.byref(room))
    while status == Status.TOO_SMALL:
        # Another thread may create a pool in between, which takes more room.
        stats = (MemoryStat * room.value)()
        status = function(number, stats, len(stats), ctypes.byref(room))
    check(status)
    kept = {"kept_host_bytes": kept_host_bytes(number)}
    return MemoryStats({stat.key.decode(): stat.value for stat in stats[: room.value]} | region_stats(number) | kept)


def snapshot() -> Any:
    """Returns every segment and block of the devices in use, as `torch.cuda.memory._snapshot` does.

    It has no history: use PyTorch's function for that. `regions` has the result of the function of that name. If there
    are any, `region_pools` lists the pools with memory of regions, and `pauses` the paused segments.
    """
    return {**pickle.loads(_snapshot_pickle()), "regions": regions()}


def dump_snapshot(path: str | os.PathLike[str] = "dump_snapshot.pickle") -> None:
    """Writes `snapshot()` to a file, for `lowtide` and for PyTorch's viewer, pytorch.org/memory_viz.

    Only this user can read the file. Replaces a regular file of this user; raises `OSError` if anything else is there.
    """
    write(path, pickle.dumps(snapshot()))


def empty_cache() -> None:
    """Releases all cached memory to the driver, on every device."""
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
        # C would truncate a larger number.
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
