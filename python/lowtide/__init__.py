"""lowtide: a GPU memory allocator for PyTorch.

`python -m lowtide run train.py` runs a script on it. From within a program it is

    import lowtide
    lowtide.install()

before anything is on the GPU. After either, everything that `torch.cuda` says about memory keeps working.
"""

from ._errors import ConfigError, Error, NoDriverError, StartedError, TorchError
from ._install import install
from ._memory import dump_snapshot, empty_cache, memory_stats, snapshot, version

__all__ = [
    "ConfigError",
    "Error",
    "NoDriverError",
    "StartedError",
    "TorchError",
    "dump_snapshot",
    "empty_cache",
    "install",
    "memory_stats",
    "snapshot",
    "version",
]
