"""Regions: memory that leaves the card and comes back at the same address.

with lowtide.region("kv_cache"):
    cache = torch.empty(size, device="cuda")
lowtide.pause("kv_cache")  # its memory is for others
lowtide.resume("kv_cache")  # at the same address, with what `backup` says of its contents

liblowtide.so alone knows which region serves a thread's requests and what is paused, so that C, Python and the packages
of `lowtide.compat` see the same.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from . import _install
from ._errors import Error
from ._inside import Inside
from ._library import Mempool, Region, RegionVisitor, Status, check, library, path_to_c

Backup = Literal["host", "disk"]
"""Where the contents of a region are kept while it is paused."""

_KINDS: tuple[Backup | None, ...] = (None, "host", "disk")
_STATES = ("mapped", "pausing", "paused", "resuming")
_SUMS = ("pauses", "resumes", "saved_bytes", "restored_bytes", "pause_ns", "resume_ns", "save_ns", "restore_ns")
_LATEST = tuple(f"last_{name}" for name in _SUMS[2:])
_CURRENT = ("live_bytes", "mapped_bytes", "paused_bytes", "host_bytes", "disk_bytes")
FIGURES = (*_CURRENT, *_SUMS, *_LATEST)
"""What is counted of each region, in bytes, nanoseconds and calls."""

_SPEEDS = (("saved", "save"), ("restored", "restore"), ("last_saved", "last_save"), ("last_restored", "last_restore"))
"""Of which bytes and nanoseconds a speed is told."""


def region(tag: str, backup: Backup | None = None) -> Inside:
    """Returns a context, or a decorator of a function, in which this thread's memory comes from a region.

    A region is a tag and where contents are kept while it is paused: nowhere, in the host's memory, or in
    a file. Blocks of two regions share no page. Regions nest, and the innermost counts. A `MemPool` or a
    capture goes before it, whichever began first.

    Other threads are not in the region, and PyTorch's threads of a backward pass are others, too: what they
    allocate on a GPU, like gradients, comes from no region. Nor is the body of a generator or a coroutine
    that is decorated: use `with` inside it, and mind that the thread stays in the region where it yields or
    awaits.
    """
    return Inside(region_tag_to_c(tag), kind_to_c(backup))


def disable() -> Inside:
    """Returns a context, or a decorator, in which this thread's memory comes from no region."""
    return Inside(None, 0)


def pause(tag: str | None = None, *, keep: bool = True) -> None:
    """Takes the memory of the regions with this tag off every device, or that of all regions.

    With `keep` false nothing is kept of it, whatever the regions' backup is.

    Waits for the work of the devices, as any stream may use the memory. What is paused already stays so.
    What is freed from now on is not brought back. Until the region is resumed, a request of PyTorch's in it raises
    `RuntimeError`, and one of lowtide's own functions `PausedError`; without the shim (`python -m lowtide doctor`)
    PyTorch makes a tensor of a null pointer then. Garbage is not collected before: tensors in cycles are kept as if
    they lived.

    Not while a graph is captured on one of the devices: that fails, and the capture with it.

    Raises `BackupError` where contents could not be kept, else `Error`; that region's memory is then mapped as
    before. It keeps no other region from being paused: those that were stay so, and another attempt does the rest.
    A tag that no region has is an error.
    """
    _install.pause(tag_to_c(tag), keep)


def resume(tag: str | None = None) -> None:
    """Brings the memory of the regions with this tag back, or that of all, at the addresses that it had.

    Contents are those of the pause where the region keeps them, else undefined. What is not paused stays as
    it is. Raises `OutOfMemoryError` where the device has too little memory, also once what is cached was given back;
    `BackupError` where contents could not be read; else `Error`. That region is then paused as before, nothing is
    lost, and another attempt may work. It keeps no other region from coming back: those that did stay so, on devices
    and of tags that had room, and `regions` says which they are.
    """
    _install.resume(tag_to_c(tag))


@contextmanager
def cuda_graph(
    cuda_graph: Any,
    pool: Any = None,
    stream: Any = None,
    capture_error_mode: str = "global",
    *,
    tag: str,
    backup: Backup | None = None,
) -> Iterator[None]:
    """Captures as `torch.cuda.graph` does, into a pool whose memory is a region's.

    The graph can be replayed whenever the region is not paused. `pool` may be shared by graphs of the same
    region; one that holds other memory already is an error.

    PyTorch's workspaces for cuBLAS are cleared before and after, so that those that the graph uses are its
    pool's, and nobody else uses them. A graph that `torch.cuda.graph` captured before, on a stream that had
    multiplied matrices already, may use one of those that are cleared, and must not be replayed after this.
    """
    name, kind = region_tag_to_c(tag), kind_to_c(backup)
    import torch

    _install.check_served()
    device = torch.cuda.current_device()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    mempool = Mempool(*pool)
    # The graph holds the pool only from its capture on.
    check(library().lowtide_retain_pool(device, mempool))
    try:
        check(library().lowtide_region_pool(device, mempool, name, kind))
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.graph(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode):
                yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()
    finally:
        check(library().lowtide_release_pool(device, mempool))


def get_backup(tensor: Any) -> Any:
    """Returns a CPU tensor over the host's copy of a tensor's memory, without copying it.

    It has the tensor's type, shape and strides, and is valid until the region is resumed or the tensor is
    freed; where backups are retained (`retain_backups`), until the region is paused again or `release_backups`.
    Raises `Error` unless the tensor is in a region with the backup `"host"` that is paused, or that retained a copy;
    of what was allocated after the pause there is none.
    """
    copy = find_backup(tensor)
    if copy is None:
        raise Error(
            'there is no copy: the tensor is not in a region with the backup "host" that is paused, or retained a copy'
        )
    return copy


def find_backup(tensor: Any) -> Any | None:
    """Returns what `get_backup` does, or `None` where there is no copy."""
    import torch

    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_like(tensor, device="cpu")
    copy, size = ctypes.c_void_p(), ctypes.c_size_t()
    status = library().lowtide_backup_find(storage.data_ptr(), ctypes.byref(copy), ctypes.byref(size))
    if status in (Status.INVALID_ARGUMENT, Status.NOT_ALLOCATED):
        return None
    check(status)
    if storage.nbytes() > size.value:
        # It goes on behind the block, as memory that another library describes may.
        return None
    assert copy.value is not None
    bytes_of_host = (ctypes.c_uint8 * storage.nbytes()).from_address(copy.value)
    kept = torch.frombuffer(bytes_of_host, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype)
    found = empty.set_(kept, tensor.storage_offset(), tensor.size(), tensor.stride())
    # Views of which PyTorch notes the sign, and leaves the memory as it is.
    found = found.conj() if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found


def set_backup_directory(path: str | os.PathLike[str]) -> None:
    """Keeps contents of regions with the backup `"disk"` in files of this directory from the next pause on.

    Without it, it is `LOWTIDE_BACKUP_DIR`, or the system's directory for temporary files.
    """
    check(library().lowtide_set_backup_directory(path_to_c(path)))


def retain_backups(retain: bool = True) -> None:
    """Keeps the host's memory of backups for the next pause, which is faster for it, until it is released.

    Until that pause `get_backup` still reads what the last one kept. The host's memory then has the copies of all
    regions at once. Where it is short, the pause of another region ends those that `get_backup` did not return, on
    every device, and raises `BackupError` if that is too little. Otherwise a resume ends the backup, and its memory
    goes back 30 seconds after it was last used. Files are never kept.
    """
    check(library().lowtide_retain_backups(retain))


def release_backups() -> None:
    """Gives the host's memory back that waits for the next pause, retained or not.

    Tensors that `get_backup` returned of regions that are not paused must not be used any more.
    """
    check(library().lowtide_release_backups())


def release_idle_backups() -> None:
    """As `release_backups`, and leaves alone what `get_backup` reads."""
    check(library().lowtide_release_idle_backups())


def page_lock_backups() -> None:
    """Returns once the host's memory of backups is page-locked, which is done beside the program."""
    check(library().lowtide_page_lock_backups())


def trim(tag: str, backup: Backup | None, device: int) -> bool:
    """Gives back what a region has on a device and no block uses, and where that is all of it, its copy, too.

    A region that was paused is then not any more. Does nothing for one that was never on the device. Returns whether
    this process can have regions: one that was forked from another with CUDA has none of its memory.
    """
    status = library().lowtide_region_trim(device, tag_to_c(tag), kind_to_c(backup))
    if status == Status.FORKED:
        return False
    check(status)
    return True


def regions() -> list[dict[str, Any]]:
    """Returns each region of each device: its `tag`, `device`, `backup` and `state`, and its figures.

    Bytes: `live_bytes` of blocks that are held, `mapped_bytes` on the card, `paused_bytes` that a resume would take
    now, `host_bytes` and `disk_bytes` of its contents. Memory that a resume leaves for the next pause is no region's:
    `memory_stats` has it as `kept_host_bytes`. Calls, nanoseconds and bytes copied: `pauses`, `resumes`,
    `pause_ns`, `resume_ns`, `saved_bytes`, `restored_bytes`, all summed up; with `last_` before them, of the last.

    `save_ns` and `restore_ns` are the parts of these times in which contents were copied, without the wait for the
    device, and `saved_bytes_per_second` and `restored_bytes_per_second` are how fast that was: 0 where nothing was
    copied, as by a pause that keeps nothing. With `last_` before them, all four are of the last.
    """
    found: list[dict[str, Any]] = []

    def visit(_context: int, pointer: Any) -> None:
        seen: Region = pointer.contents
        figures = {name: getattr(seen, name) for name in FIGURES}
        found.append(
            {
                "tag": seen.tag.decode(),
                "device": seen.device,
                "backup": _KINDS[seen.backup],
                "state": _STATES[seen.state],
                **figures,
                **_speeds([figures]),
            }
        )

    check(library().lowtide_visit_regions(RegionVisitor(visit), None))
    return found


def region_stats(device: int) -> dict[str, int]:
    """Returns a device's figures by keys like `region.kv_cache.mapped_bytes`, each tag's added up.

    Of those that begin with `last_` it is the largest: what the slowest of a tag's regions took. Speeds are those of
    all that was copied, one region after the other.
    """
    by_tag: dict[str, list[dict[str, Any]]] = {}
    for seen in regions():
        if seen["device"] == device:
            by_tag.setdefault(seen["tag"], []).append(seen)
    stats: dict[str, int] = {}
    for tag, of_tag in by_tag.items():
        for name in FIGURES:
            figures = (seen[name] for seen in of_tag)
            stats[f"region.{tag}.{name}"] = max(figures) if name in _LATEST else sum(figures)
        for name, speed in _speeds(of_tag).items():
            stats[f"region.{tag}.{name}"] = speed
    return stats


def kept_host_bytes(device: int) -> int:
    """Returns how much of the host's memory ended backups of a device have left for the next ones."""
    kept = ctypes.c_uint64()
    check(library().lowtide_kept_host_bytes(device, ctypes.byref(kept)))
    return kept.value


def _speeds(figures: list[dict[str, Any]]) -> dict[str, int]:
    """Returns how fast contents were copied in some regions: 0 where none were."""
    speeds: dict[str, int] = {}
    for copied, copying in _SPEEDS:
        copied_bytes = sum(each[f"{copied}_bytes"] for each in figures)
        ns = sum(each[f"{copying}_ns"] for each in figures)
        speeds[f"{copied}_bytes_per_second"] = copied_bytes * 10**9 // ns if ns else 0
    return speeds


def kind_to_c(backup: Backup | None) -> int:
    """Returns the number of `enum lowtide_backup`; raises `ValueError` for what is none."""
    if backup not in _KINDS:
        raise ValueError(f'a backup is None, "host" or "disk", not {backup!r}')
    return _KINDS.index(backup)


def region_tag_to_c(tag: str) -> bytes:
    """As `tag_to_c`, and raises `TypeError` for `None`: nobody would know that they are in no region."""
    as_c = tag_to_c(tag)
    if as_c is None:
        raise TypeError("a tag is a text: not None")
    return as_c


def tag_to_c(tag: str | None) -> bytes | None:
    """Returns a tag as C takes it. Raises `TypeError` for what is no text, `ValueError` for what C would cut off."""
    if not isinstance(tag, str | None):
        raise TypeError(f"a tag is a text: not {tag!r}")
    if tag is not None and (not tag or "\0" in tag):
        raise ValueError(f"a tag has characters, none of them zero: not {tag!r}")
    return None if tag is None else tag.encode()
