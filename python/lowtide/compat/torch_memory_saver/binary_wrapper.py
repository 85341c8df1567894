"""The functions `tms_*` of liblowtide.so."""

import ctypes
import functools
import os
from typing import Any, TypedDict

from ..._install import import_torch
from ..._library import PATH, library


class Config(TypedDict):
    """The settings of a thread's requests."""

    tag: str
    interesting_region: bool
    enable_cpu_backup: bool
    cpu_backup_backend: str | None
    enable_disk_backup: bool


class Library(ctypes.CDLL):
    """liblowtide.so with argument types, and CUDA's runtime, because the original library is linked to it."""

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
    """Returns CUDA's runtime that PyTorch has loaded, or `None` if it is no separate file."""
    torch = import_torch()
    major, _, _ = (torch.version.cuda or "").partition(".")
    try:
        return ctypes.CDLL(f"libcudart.so.{major}")
    except OSError:
        return None


def cuda_runtime_file() -> str | None:
    """Returns the path of that runtime, or `None` if there is none."""
    runtime = cuda_runtime()
    if runtime is None:
        return None
    found = ctypes.POINTER(LinkMap)()
    # Ask for the path that was loaded: another file may have replaced it.
    failed = ctypes.CDLL(None).dlinfo(ctypes.c_void_p(runtime._handle), DLINFO_LINK_MAP, ctypes.byref(found))
    return None if failed else os.fsdecode(found.contents.name)


class LinkMap(ctypes.Structure):
    """The first members of the loader's `struct link_map`."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


# Makes `dlinfo` return a library's `LinkMap`.
DLINFO_LINK_MAP = 2


class BinaryWrapper:
    """The library, as `cdll`. It is always lowtide's, whatever the path."""

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
        """Sets the settings of this thread's requests."""
        # Leave the region first: otherwise a region with the new tag and the old backup would be entered in between.
        self.cdll.tms_set_interesting_region(False)
        self.cdll.tms_set_current_tag(tag.encode())
        self.cdll.tms_set_enable_cpu_backup(enable_cpu_backup)
        self.cdll.tms_set_enable_disk_backup(enable_disk_backup)
        if cpu_backup_backend is not None:
            self.cdll.tms_set_cpu_backup_backend(cpu_backup_backend.encode())
        self.cdll.tms_set_interesting_region(interesting_region)

    def get_config(self) -> Config:
        """Returns the settings of this thread's requests."""
        return {
            "tag": self.cdll.tms_get_current_tag().decode(),
            "interesting_region": self.cdll.tms_get_interesting_region(),
            "enable_cpu_backup": self.cdll.tms_get_enable_cpu_backup(),
            "cpu_backup_backend": self.cdll.tms_get_cpu_backup_backend().decode(),
            "enable_disk_backup": self.cdll.tms_get_enable_disk_backup(),
        }
