"""Regions: memory that leaves the GPU and comes back at the same address.

with lowtide.region("kv_cache"):
    cache = torch.empty(size, device="cuda")
lowtide.pause("kv_cache")  # releases its memory for other uses
lowtide.resume("kv_cache")  # at the same address, with its contents if it has a `backup`

The state of regions is in liblowtide.so alone, so that C, Python and the packages of `lowtide.compat` see the same.
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
"""The place that keeps a region's contents while it is paused."""

_KINDS: tuple[Backup | None, ...] = (None, "host", "disk")
_STATES = ("mapped", "pausing", "paused", "resuming")
_SUMS = ("pauses", "resumes", "saved_bytes", "restored_bytes", "pause_ns", "resume_ns", "save_ns", "restore_ns")
_LATEST = tuple(f"last_{name}" for name in _SUMS[2:])
_CURRENT = ("live_bytes", "mapped_bytes", "paused_bytes", "host_bytes", "disk_bytes")
FIGURES = (*_CURRENT, *_SUMS, *_LATEST)
"""The figures of each region, in bytes, nanoseconds and calls."""

_SPEEDS = (("saved", "save"), ("restored", "restore"), ("last_saved", "last_save"), ("last_restored", "last_restore"))
"""The prefixes of the figures that a speed is computed from: bytes, and nanoseconds."""


def region(tag: str, backup: Backup | None = None) -> Inside:
    """Returns a context, or a decorator of a function, in which this thread's memory comes from a region.

    A region is a tag and a backup, which keeps contents while the region is paused: none, host memory, or a file.
    Blocks of two regions share no page. Regions nest, and the innermost one counts. A `MemPool` or a capture takes
    precedence, whichever began first.

    Other threads are not in the region. PyTorch runs a backward pass in threads of its own, so gradients on a GPU come
    from no region. A decorated generator or coroutine does not run in the region: use `with` inside it. The thread
    stays in the region while such a body yields or awaits.
    """
    return Inside(region_tag_to_c(tag), kind_to_c(backup))


def disable() -> Inside:
    """Returns a context, or a decorator, in which this thread's memory comes from no region."""
    return Inside(None, 0)


def pause(tag: str | None = None, *, keep: bool = True) -> None:
    """Takes the memory of the regions with this tag off every device, or that of all regions.

    With `keep` false no contents are saved, whatever the regions' backup is.

    Waits for the work of the devices, because any stream may use the memory. Regions that are paused already stay
    paused. Blocks that are freed from now on are not resumed. Python's garbage is not collected before: tensors in
    reference cycles are saved, too.

    Until the resume, a request of PyTorch in the region raises `RuntimeError`, and one of lowtide's own functions
    `PausedError`. Without the shim (`lowtide doctor`), PyTorch makes a tensor with a null pointer instead.

    Do not pause while a graph is captured on one of the devices: both the pause and the capture fail.

    Raises `BackupError` if contents could not be saved, else `Error`; that region's memory is then mapped as before.
    Other regions are paused all the same, and stay so; another attempt pauses the rest. A tag that no region has is
    an error.
    """
    _install.pause(tag_to_c(tag), keep)


def resume(tag: str | None = None) -> None:
    """Brings the memory of the regions with this tag back, or that of all, at the addresses that it had.

    Contents are those of the pause if the region has a backup, else undefined. Regions that are not paused do not
    change.

    Raises `OutOfMemoryError` if the device has too little memory even after cached memory was released, `BackupError`
    if contents could not be read, else `Error`. That region then stays paused, nothing is lost, and another attempt
    may work. Other regions are resumed all the same; `regions` lists the state of each.
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
    """Captures a graph like `torch.cuda.graph`, into a pool whose memory is in a region.

    The graph can be replayed whenever the region is not paused. Graphs of the same region may share a `pool`; a pool
    that holds other memory already is an error.

    PyTorch's cuBLAS workspaces are cleared before and after, so that the graph's workspaces are in its pool and are not
    used elsewhere. An earlier graph of `torch.cuda.graph` may use a cleared workspace, if its stream had multiplied
    matrices before the capture. Such a graph must not be replayed after this.
    """
    name, kind = region_tag_to_c(tag), kind_to_c(backup)
    import torch

    _install.check_served()
    device = torch.cuda.current_device()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    mempool = Mempool(*pool)
    # The graph holds a reference to the pool only from its capture on.
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

    It has the tensor's type, shape and strides. It is valid until the region is resumed or the tensor is freed; with
    `retain_backups`, until the next pause of the region or `release_backups`.

    Raises `Error` unless the tensor is in a region with the backup `"host"` that is paused or retained a copy. Blocks
    that were allocated after the pause have no copy.
    """
    copy = find_backup(tensor)
    if copy is None:
        raise Error(
            'there is no copy: the tensor is not in a region with the backup "host" that is paused, or retained a copy'
        )
    return copy


def find_backup(tensor: Any) -> Any | None:
    """Returns the same as `get_backup`, or `None` if there is no copy."""
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
        # The tensor goes on after the block, as a tensor of another library may.
        return None
    assert copy.value is not None
    bytes_of_host = (ctypes.c_uint8 * storage.nbytes()).from_address(copy.value)
    kept = torch.frombuffer(bytes_of_host, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype)
    found = empty.set_(kept, tensor.storage_offset(), tensor.size(), tensor.stride())
    # PyTorch marks conjugate and negative views, and does not change their memory.
    found = found.conj() if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found


def set_backup_directory(path: str | os.PathLike[str]) -> None:
    """Sets the directory for files of regions with the backup `"disk"`, from the next pause on.

    The default is `LOWTIDE_BACKUP_DIR`, else the system's directory for temporary files.
    """
    check(library().lowtide_set_backup_directory(path_to_c(path)))


def retain_backups(retain: bool = True) -> None:
    """Keeps the host memory of backups until the next pause, which is then faster, or until `release_backups`.

    Until that pause, `get_backup` still reads the copies of the last one. Host memory then has the copies of all
    regions at once. If it runs short, the pause of another region releases the copies that `get_backup` did not return,
    on every device. If that is not enough, it raises `BackupError`.

    With `retain` false, a resume ends the backup, and its memory is released 30 seconds after its last use. Files are
    never kept.
    """
    check(library().lowtide_retain_backups(retain))


def release_backups() -> None:
    """Releases the host memory that is kept for the next pause, retained or not.

    Tensors that `get_backup` returned must not be used any more if their region is not paused.
    """
    check(library().lowtide_release_backups())


def release_idle_backups() -> None:
    """Like `release_backups`, but keeps the copies that `get_backup` reads."""
    check(library().lowtide_release_idle_backups())


def page_lock_backups() -> None:
    """Waits until the host memory of backups is page-locked, which a background thread does."""
    check(library().lowtide_page_lock_backups())


def trim(tag: str, backup: Backup | None, device: int) -> bool:
    """Releases a region's memory on a device that no block uses. If that is all of it, its copy is released, too.

    Then the region is not paused any more. Does nothing for a region that was never on the device. Returns whether
    this process can have regions: a process that was forked from one with CUDA cannot.
    """
    status = library().lowtide_region_trim(device, tag_to_c(tag), kind_to_c(backup))
    if status == Status.FORKED:
        return False
    check(status)
    return True


def regions() -> list[dict[str, Any]]:
    """Returns each region of each device: its `tag`, `device`, `backup` and `state`, and its figures.

    - `live_bytes` of allocated blocks, `mapped_bytes` on the GPU, `paused_bytes` that a resume would take now.
    - `host_bytes` and `disk_bytes` of saved contents. Host memory that a resume keeps for the next pause belongs to no
      region: see `kept_host_bytes` of `memory_stats`.
    - Sums over all calls: `pauses`, `resumes`, `pause_ns`, `resume_ns`, `saved_bytes`, `restored_bytes`.
    - `save_ns` and `restore_ns`: the time spent copying contents, without the wait for the device.
    - `saved_bytes_per_second` and `restored_bytes_per_second`: the speed of these copies; 0 if nothing was copied.

    The times, bytes and speeds also exist with `last_` in front, for the last call.
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
    """Returns a device's figures by keys like `region.kv_cache.mapped_bytes`, summed over a tag's regions.

    A figure that begins with `last_` is the largest one of the tag's regions. Speeds are the bytes of all copies over
    their total time.
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
    """Returns the bytes of host memory that a device's ended backups keep for the next ones."""
    kept = ctypes.c_uint64()
    check(library().lowtide_kept_host_bytes(device, ctypes.byref(kept)))
    return kept.value


def _speeds(figures: list[dict[str, Any]]) -> dict[str, int]:
    """Returns the copy speeds of some regions; 0 if nothing was copied."""
    speeds: dict[str, int] = {}
    for copied, copying in _SPEEDS:
        copied_bytes = sum(each[f"{copied}_bytes"] for each in figures)
        ns = sum(each[f"{copying}_ns"] for each in figures)
        speeds[f"{copied}_bytes_per_second"] = copied_bytes * 10**9 // ns if ns else 0
    return speeds


def kind_to_c(backup: Backup | None) -> int:
    """Returns the value of `enum lowtide_backup`. Raises `ValueError` for anything else."""
    if backup not in _KINDS:
        raise ValueError(f'a backup is None, "host" or "disk", not {backup!r}')
    return _KINDS.index(backup)


def region_tag_to_c(tag: str) -> bytes:
    """Like `tag_to_c`, but raises `TypeError` for `None`, which would silently mean no region."""
    as_c = tag_to_c(tag)
    if as_c is None:
        raise TypeError("a tag is a text: not None")
    return as_c


def tag_to_c(tag: str | None) -> bytes | None:
    """Returns a tag as C takes it. Raises `TypeError` if it is no text, `ValueError` if C would truncate it."""
    if not isinstance(tag, str | None):
        raise TypeError(f"a tag is a text: not {tag!r}")
    if tag is not None and (not tag or "\0" in tag):
        raise ValueError(f"a tag has characters, none of them zero: not {tag!r}")
    return None if tag is None else tag.encode()
