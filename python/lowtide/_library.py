"""liblowtide.so, called by ctypes. `lowtide.h` documents every function."""

import ctypes
import enum
import functools
import os
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path

from ._errors import BackupError, ConfigError, Error, NoDriverError, OutOfMemoryError, PausedError, StartedError

PATH = Path(__file__).parent / "liblowtide.so"
"""The path of the library. PyTorch loads it from there, too."""

INCLUDE = Path(__file__).parent / "include"
"""The directory with `lowtide.h`."""

ABI_VERSION = 3
"""The version of the C interface that this package uses: `LOWTIDE_ABI_VERSION` of `lowtide.h`."""


class Status(enum.IntEnum):
    """`enum lowtide_status`."""

    OK = 0
    OUT_OF_MEMORY = 1
    INVALID_ARGUMENT = 2
    NOT_ALLOCATED = 3
    POOL = 4
    DRIVER = 5
    NO_DRIVER = 6
    CONFIG = 7
    STARTED = 8
    FORKED = 9
    TOO_SMALL = 10
    INTERNAL = 11
    PAUSED = 12
    BACKUP = 13
    FILE = 14
    NOT_FREE = 15


class Mempool(ctypes.Structure):
    """`struct lowtide_mempool`."""

    _fields_ = (("capture", c_uint64), ("user", c_uint64))


class MemoryStat(ctypes.Structure):
    """`struct lowtide_memory_stat`."""

    _fields_ = (("key", ctypes.c_char * 96), ("value", c_int64))


class Region(ctypes.Structure):
    """`struct lowtide_region`."""

    _fields_ = (
        ("tag", c_char_p),
        ("device", c_int),
        ("backup", c_int),
        ("state", c_int),
        ("live_bytes", c_uint64),
        ("mapped_bytes", c_uint64),
        ("paused_bytes", c_uint64),
        ("host_bytes", c_uint64),
        ("disk_bytes", c_uint64),
        ("pauses", c_uint64),
        ("resumes", c_uint64),
        ("saved_bytes", c_uint64),
        ("restored_bytes", c_uint64),
        ("pause_ns", c_uint64),
        ("resume_ns", c_uint64),
        ("last_pause_ns", c_uint64),
        ("last_resume_ns", c_uint64),
        ("last_saved_bytes", c_uint64),
        ("last_restored_bytes", c_uint64),
        ("save_ns", c_uint64),
        ("restore_ns", c_uint64),
        ("last_save_ns", c_uint64),
        ("last_restore_ns", c_uint64),
    )


RegionVisitor = ctypes.CFUNCTYPE(None, c_void_p, POINTER(Region))
"""The type of the callback of `lowtide_visit_regions`."""


# The result and argument types of each function that Python calls. Functions that PyTorch calls are only looked up.
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "lowtide_abi_version": (c_uint32, []),
    "lowtide_annotate": (c_int, [c_void_p, c_char_p]),
    "lowtide_allocate": (c_int, [c_size_t, c_int, c_void_p, POINTER(c_void_p)]),
    "lowtide_begin_allocate_to_pool": (c_int, [c_int, Mempool, c_void_p, c_void_p, c_void_p]),
    "lowtide_backup_find": (c_int, [c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "lowtide_capture_begin": (c_int, [c_int]),
    "lowtide_capture_end": (c_int, [c_int]),
    "lowtide_config": (c_char_p, []),
    "lowtide_configure": (c_int, [c_char_p, c_char_p]),
    "lowtide_deallocate": (c_int, [c_void_p]),
    "lowtide_empty_cache": (c_int, [c_int]),
    "lowtide_end_allocate_to_pool": (c_int, [c_int, Mempool]),
    "lowtide_kept_host_bytes": (c_int, [c_int, POINTER(c_uint64)]),
    "lowtide_last_error": (c_char_p, []),
    "lowtide_memory_info": (c_int, [c_int, POINTER(c_uint64), POINTER(c_uint64)]),
    "lowtide_memory_stats": (c_int, [c_int, POINTER(MemoryStat), c_size_t, POINTER(c_size_t)]),
    "lowtide_page_lock_backups": (c_int, []),
    "lowtide_pause": (c_int, [c_char_p]),
    "lowtide_pause_and_drop": (c_int, [c_char_p]),
    "lowtide_recording": (c_int, [POINTER(c_uint64)]),
    "lowtide_record_start": (c_int, [c_char_p, c_bool]),
    "lowtide_record_stop": (c_int, []),
    "lowtide_region_enter": (c_int, [c_char_p, c_int]),
    "lowtide_region_leave": (c_int, []),
    "lowtide_region_pool": (c_int, [c_int, Mempool, c_char_p, c_int]),
    "lowtide_region_trim": (c_int, [c_int, c_char_p, c_int]),
    "lowtide_release_backups": (c_int, []),
    "lowtide_release_idle_backups": (c_int, []),
    "lowtide_release_bytes": (None, [c_void_p]),
    "lowtide_release_pool": (c_int, [c_int, Mempool]),
    "lowtide_reset_peak_stats": (c_int, [c_int]),
    "lowtide_resume": (c_int, [c_char_p]),
    "lowtide_retain_backups": (c_int, [c_bool]),
    "lowtide_retain_pool": (c_int, [c_int, Mempool]),
    "lowtide_set_backup_directory": (c_int, [c_char_p]),
    "lowtide_set_metadata": (c_int, [c_char_p]),
    "lowtide_set_torch_version": (c_int, [c_uint32, c_uint32]),
    "lowtide_snapshot": (c_int, [POINTER(c_void_p), POINTER(c_size_t)]),
    "lowtide_version": (c_char_p, []),
    "lowtide_visit_regions": (c_int, [RegionVisitor, c_void_p]),
    "set_memory_margin_bytes": (None, [c_uint64]),
    "tms_get_cpu_backup_backend": (c_char_p, []),
    "tms_get_cpu_backup_pointer": (POINTER(c_uint8), [POINTER(c_uint8), c_uint64]),
    "tms_get_current_tag": (c_char_p, []),
    "tms_get_enable_cpu_backup": (c_bool, []),
    "tms_get_enable_disk_backup": (c_bool, []),
    "tms_get_interesting_region": (c_bool, []),
    "tms_get_retain_cpu_backup": (c_bool, []),
    "tms_pause": (c_int, [c_char_p]),
    "tms_resume": (c_int, [c_char_p]),
    "tms_set_cpu_backup_backend": (None, [c_char_p]),
    "tms_set_current_tag": (None, [c_char_p]),
    "tms_set_disk_backup_dir": (None, [c_char_p]),
    "tms_set_enable_cpu_backup": (None, [c_bool]),
    "tms_set_enable_disk_backup": (None, [c_bool]),
    "tms_set_interesting_region": (None, [c_bool]),
    "tms_set_retain_cpu_backup": (None, [c_bool]),
}

_ERRORS: dict[int, type[Error]] = {
    Status.OUT_OF_MEMORY: OutOfMemoryError,
    Status.CONFIG: ConfigError,
    Status.NO_DRIVER: NoDriverError,
    Status.STARTED: StartedError,
    Status.PAUSED: PausedError,
    Status.BACKUP: BackupError,
}


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the library, loaded with RTLD_GLOBAL.

    Raises `Error` if it is missing, or its version is not this package's.
    """
    try:
        loaded = ctypes.CDLL(str(PATH), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise Error(f"liblowtide.so cannot be loaded ({error}): install lowtide anew") from None
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    found = loaded.lowtide_abi_version()
    if found != ABI_VERSION:
        raise Error(f"{PATH} has interface {found}, and {ABI_VERSION} is needed: install lowtide anew")
    return loaded


def check(status: int) -> None:
    """Raises the exception of a status, with the library's message. Does nothing for `OK`."""
    if status != Status.OK:
        raise error_of(status, library().lowtide_last_error())


def error_of(status: int, text: bytes) -> Error:
    """Returns the exception of a status, with this message."""
    return _ERRORS.get(status, Error)(text.decode())


def path_to_c(path: str | os.PathLike[str]) -> bytes:
    """Returns a path as C takes it. Raises `ValueError` for a path with a zero byte, as `open` does."""
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise ValueError(f"a zero byte in the path {path!r}")
    return encoded


def address(name: str) -> int:
    """Returns the address of a function of the library."""
    function = ctypes.cast(getattr(library(), name), c_void_p).value
    assert function is not None
    return function
