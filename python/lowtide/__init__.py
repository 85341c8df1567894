"""lowtide: a GPU memory allocator for PyTorch.

`lowtide run train.py` runs a script on it. A program installs it itself, before it uses the GPU:

    import lowtide
    lowtide.install()

The memory functions of `torch.cuda` keep working. `pause` and `resume` move memory that was allocated in a
`lowtide.region` off the GPU and back.
"""

from ._categories import Categorization, categorize
from ._errors import (
    BackupError,
    ConfigError,
    Error,
    NoDriverError,
    OutOfMemoryError,
    PausedError,
    StartedError,
    TorchError,
)
from ._install import install, is_installed
from ._memory import dump_snapshot, empty_cache, memory_stats, snapshot, version
from ._record import Recording, record
from ._regions import (
    cuda_graph,
    disable,
    get_backup,
    pause,
    region,
    regions,
    release_backups,
    resume,
    retain_backups,
    set_backup_directory,
)
from ._report import Report, report
from ._show import MemoryStats

__all__ = [
    "BackupError",
    "Categorization",
    "ConfigError",
    "Error",
    "MemoryStats",
    "NoDriverError",
    "OutOfMemoryError",
    "PausedError",
    "Recording",
    "Report",
    "StartedError",
    "TorchError",
    "categorize",
    "cuda_graph",
    "disable",
    "dump_snapshot",
    "empty_cache",
    "get_backup",
    "install",
    "is_installed",
    "memory_stats",
    "pause",
    "record",
    "region",
    "regions",
    "release_backups",
    "report",
    "resume",
    "retain_backups",
    "set_backup_directory",
    "snapshot",
    "version",
]


def __getattr__(name: str) -> str:
    # Not at import: the version is the library's, which is loaded when it is needed.
    if name == "__version__":
        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
