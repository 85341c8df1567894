"""The functions `tms_*` of liblowtide.so."""

import ctypes
import functools
import os
from typing import Any, TypedDict

from ..._install import import_torch
from ..._library import PATH, library


class Config(TypedDict):
    """What a thread's requests are to be."""

    tag: str
    interesting_region: bool
    enable_cpu_backup: bool
    cpu_backup_backend: str | None
    enable_disk_backup: bool


class Library(ctypes.CDLL):
    """liblowtide.so with what its functions take, and CUDA's runtime, to which the other's library is linked."""

    def __init__(self) -> None:
        ours = library()
        super().__init__(ours._name, handle=ours._handle)

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(library(), name)
        except AttributeError:
            runtime = cuda_runtime()
            if runtime is None:
                raise
        return getattr(runtime, name)


@functools.cache
def cuda_runtime() -> ctypes.CDLL | None:
    """Returns CUDA's runtime that PyTorch has loaded, or `None` where it has none of its own file."""
    torch = import_torch()
    major, _, _ = (torch.version.cuda or "").partition(".")
    try:
        return ctypes.CDLL(f"libcudart.so.{major}")
    except OSError:
        return None


def cuda_runtime_file() -> str | None:
    """Returns where that runtime is, or `None` where there is none."""
    runtime = cuda_runtime()
    if runtime is None:
        return None
    found = ctypes.POINTER(LinkMap)()
    # By the name that it was found by: another file may stand in for it.
    failed = ctypes.CDLL(None).dlinfo(ctypes.c_void_p(runtime._handle), DLINFO_LINK_MAP, ctypes.byref(found))
    return None if failed else os.fsdecode(found.contents.name)


class LinkMap(ctypes.Structure):
    """The beginning of what the system's loader knows of a library."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


# Has `dlinfo` say where a library's `LinkMap` is.
DLINFO_LINK_MAP = 2


class BinaryWrapper:
    """The library, as `cdll`. Wherever it is said to be, there is one."""

    def __init__(self, path_binary: str = str(PATH)) -> None:
        self.cdll = Library()

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
