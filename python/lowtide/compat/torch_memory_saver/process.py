"""The region that a whole process is in."""

import ctypes

from ... import _regions
from ..._errors import Error
from ..._library import check, library
from .._variables import read_variables

TAG = "default"


class ProcessRegion:
    """The process's region. A resume refills its cache, because the program is going to request that memory again."""

    def __init__(self, backup: "_regions.Backup | None") -> None:
        self._backup: _regions.Backup | None = backup
        # The mapped bytes of each device before the pause.
        self._mapped: dict[int, int] = {}

    @staticmethod
    def asked_for() -> "ProcessRegion | None":
        """Returns the region in the environment, or `None`. Raises `ConfigError` for invalid variables."""
        variables = read_variables()
        backup = backup_of(variables.keeps_on_cpu, variables.keeps_on_disk)
        return ProcessRegion(backup) if variables.is_process_in_region else None

    def note(self) -> None:
        """Notes the mapped bytes on each device, before a pause."""
        self._mapped |= {device: size for device, size in self._sizes("mapped").items() if size > 0}

    def fill(self) -> None:
        """Fills the cache of each resumed region to the noted size: allocates what is missing, and frees it."""
        for device, size in self._sizes("mapped").items():
            missing = self._mapped.pop(device, 0) - size
            if missing > 0:
                self._cache(device, missing)

    def _sizes(self, state: str) -> dict[int, int]:
        seen = (seen for seen in _regions.regions() if (seen["tag"], seen["backup"]) == (TAG, self._backup))
        return {region["device"]: region["mapped_bytes"] for region in seen if region["state"] == state}

    def _cache(self, device: int, size: int) -> None:
        memory = ctypes.c_void_p()
        try:
            with _regions.region(TAG, self._backup):
                check(library().lowtide_allocate(size, device, None, ctypes.byref(memory)))
            check(library().lowtide_deallocate(memory))
        except Error:
            # The memory is in use elsewhere by now. The program requests what it needs itself.
            pass


def backup_of(cpu: bool, disk: bool) -> "_regions.Backup | None":
    """Returns the backup for a region with one on the CPU, on disk, or none."""
    if cpu:
        return "host"
    return "disk" if disk else None
