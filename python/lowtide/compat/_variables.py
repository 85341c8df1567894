"""The environment variables of torch_memory_saver that configure a whole process."""

import os
from dataclasses import dataclass
from typing import Literal, get_args

from .._errors import ConfigError

CpuBackupBackend = Literal["mmap", "pinned"]
"""A kind of host memory for backups."""

BACKENDS: tuple[str, ...] = get_args(CpuBackupBackend)

_ANSWERS = {
    **dict.fromkeys(("", "0", "false", "no", "off"), False),
    **dict.fromkeys(("1", "true", "yes", "on"), True),
}
_CPU, _DISK = "TMS_INIT_ENABLE_CPU_BACKUP", "TMS_INIT_ENABLE_DISK_BACKUP"


@dataclass(frozen=True)
class Variables:
    """The settings in these variables that Python uses; the library reads the others."""

    is_process_in_region: bool
    keeps_on_cpu: bool
    keeps_on_disk: bool


def read_variables() -> Variables:
    """Returns the settings. Raises `ConfigError` for an invalid value: a wrong guess could lose contents."""
    variables = Variables(_is_true("TMS_INIT_ENABLE"), _is_true(_CPU), _is_true(_DISK))
    _is_true("TMS_RETAIN_CPU_BACKUP")
    if variables.keeps_on_cpu and variables.keeps_on_disk:
        raise ConfigError(f"{_CPU} and {_DISK} are both set: a region has a backup on the CPU or on disk, not both")
    backend = os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND") or BACKENDS[0]
    if backend not in BACKENDS:
        raise ConfigError(f"TMS_INIT_CPU_BACKUP_BACKEND is {backend!r}, and can be {' or '.join(BACKENDS)}")
    return variables


def _is_true(variable: str) -> bool:
    value = os.environ.get(variable, "")
    if value.lower() not in _ANSWERS:
        raise ConfigError(f"{variable} is {value!r}, and can be 0 or 1")
    return _ANSWERS[value.lower()]
