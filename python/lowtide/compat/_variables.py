"""The variables by which torch_memory_saver is told what a whole process does."""

import os

from .._errors import ConfigError

BACKENDS = ("mmap", "pinned")
"""The kinds of the host's memory that backups may be in."""

_ANSWERS = {
    **dict.fromkeys(("", "0", "false", "no", "off"), False),
    **dict.fromkeys(("1", "true", "yes", "on"), True),
}
_CPU, _DISK = "TMS_INIT_ENABLE_CPU_BACKUP", "TMS_INIT_ENABLE_DISK_BACKUP"


def is_process_in_region() -> bool:
    """Returns whether the whole process is to be in a region. Raises `ConfigError`, as all here do."""
    return _is_true("TMS_INIT_ENABLE")


def keeps_on_cpu() -> bool:
    """Returns whether the contents of that region are kept in the host's memory."""
    return _is_true(_CPU)


def keeps_on_disk() -> bool:
    """Returns whether they are kept on disk."""
    return _is_true(_DISK)


def check_variables() -> None:
    """Raises `ConfigError` for a value that lowtide would have to guess at: contents may depend on it."""
    is_process_in_region()
    _is_true("TMS_RETAIN_CPU_BACKUP")
    if keeps_on_cpu() and keeps_on_disk():
        raise ConfigError(f"{_CPU} and {_DISK} are both set: a region has a backup on the CPU or on disk, not both")
    backend = os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND") or BACKENDS[0]
    if backend not in BACKENDS:
        raise ConfigError(f"TMS_INIT_CPU_BACKUP_BACKEND is {backend!r}, and can be {' or '.join(BACKENDS)}")


def _is_true(variable: str) -> bool:
    value = os.environ.get(variable, "")
    if value.lower() not in _ANSWERS:
        raise ConfigError(f"{variable} is {value!r}, and can be 0 or 1")
    return _ANSWERS[value.lower()]
