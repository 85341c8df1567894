"""The functions `tms_*` of liblowtide.so."""

import ctypes
import functools
from typing import TypedDict

from ..._library import PATH, library

_TEXT, _FLAG, _BYTE = ctypes.c_char_p, ctypes.c_bool, ctypes.POINTER(ctypes.c_uint8)

# What each returns and takes.
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "set_memory_margin_bytes": (None, [ctypes.c_uint64]),
    "tms_get_cpu_backup_backend": (_TEXT, []),
    "tms_get_cpu_backup_pointer": (_BYTE, [_BYTE, ctypes.c_uint64]),
    "tms_get_current_tag": (_TEXT, []),
    "tms_get_enable_cpu_backup": (_FLAG, []),
    "tms_get_enable_disk_backup": (_FLAG, []),
    "tms_get_interesting_region": (_FLAG, []),
    "tms_get_retain_cpu_backup": (_FLAG, []),
    "tms_pause": (ctypes.c_int, [_TEXT]),
    "tms_resume": (ctypes.c_int, [_TEXT]),
    "tms_set_cpu_backup_backend": (None, [_TEXT]),
    "tms_set_current_tag": (None, [_TEXT]),
    "tms_set_disk_backup_dir": (None, [_TEXT]),
    "tms_set_enable_cpu_backup": (None, [_FLAG]),
    "tms_set_enable_disk_backup": (None, [_FLAG]),
    "tms_set_interesting_region": (None, [_FLAG]),
    "tms_set_retain_cpu_backup": (None, [_FLAG]),
}


class Config(TypedDict):
    """What a thread's requests are to be."""

    tag: str
    interesting_region: bool
    enable_cpu_backup: bool
    cpu_backup_backend: str | None
    enable_disk_backup: bool


class BinaryWrapper:
    """The library, as `cdll`, with what each of its functions takes."""

    def __init__(self, path_binary: str = str(PATH)) -> None:
        self.cdll = _load(path_binary)

    def set_config(
        self,
        *,
        tag: str,
        interesting_region: bool,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None = None,
        enable_disk_backup: bool = False,
    ) -> None:
        """Says what this thread's requests are from now on."""
        # Out of any region first: a region of the new tag with the old backup is nobody's.
        self.cdll.tms_set_interesting_region(False)
        self.cdll.tms_set_current_tag(tag.encode())
        self.cdll.tms_set_enable_cpu_backup(enable_cpu_backup)
        self.cdll.tms_set_enable_disk_backup(enable_disk_backup)
        if cpu_backup_backend is not None:
            self.cdll.tms_set_cpu_backup_backend(cpu_backup_backend.encode())
        self.cdll.tms_set_interesting_region(interesting_region)

    def get_config(self) -> Config:
        """Returns what this thread's requests are."""
        return {
            "tag": self.cdll.tms_get_current_tag().decode(),
            "interesting_region": self.cdll.tms_get_interesting_region(),
            "enable_cpu_backup": self.cdll.tms_get_enable_cpu_backup(),
            "cpu_backup_backend": self.cdll.tms_get_cpu_backup_backend().decode(),
            "enable_disk_backup": self.cdll.tms_get_enable_disk_backup(),
        }


@functools.cache
def _load(path: str) -> ctypes.CDLL:
    # The functions of this very library belong to lowtide; it is loaded for all to see.
    library()
    cdll = ctypes.CDLL(path)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(cdll, name)
        function.restype, function.argtypes = result, arguments
    return cdll
