"""The class `TorchMemorySaver`."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from ... import _regions
from ..._files import make_directory
from ..._inside import End, Inside
from ..._install import install
from .._variables import BACKENDS, CpuBackupBackend
from .binary_wrapper import BinaryWrapper, Config
from .hooks.base import HookMode, HookUtilBase
from .pools import GraphPools, Key, MemPool, Pool, Route
from .process import ProcessRegion, backup_of

_TAG_DEFAULT = "default"


class TorchMemorySaver:
    """The interface for regions. Programs use the one object in the module."""

    def __init__(self) -> None:
        self._memory_margin_bytes = 0
        self._hook_mode: HookMode = "preload"
        self._impl: _TorchMemorySaverImpl | None = None

    # ---- regions ----

    @contextmanager
    def region(
        self,
        tag: str = _TAG_DEFAULT,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """A context in which this thread's memory comes from a region, which can be paused."""
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        assert not (enable_cpu_backup and enable_disk_backup), "a region has a backup on the CPU or on disk, not both"
        with self._started().region(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend):
            yield

    @contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = _TAG_DEFAULT,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Captures a graph like `torch.cuda.graph`, into memory that can be paused."""
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        graph_pools = self._started().graph_pools
        backup: _regions.Backup | None = "host" if enable_cpu_backup else None
        own = graph_pools.find(pool, tag, backup)
        with _regions.cuda_graph(cuda_graph, own, stream, capture_error_mode, tag=tag, backup=backup):
            yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        """A context in which memory comes from no region. Its free memory is released to the driver at the end."""
        with self._started().disable():
            yield

    def pause(self, tag: str | None = None) -> None:
        """Takes the memory of a tag, or all, off the devices. Does nothing for a tag that was never used."""
        self._started().pause(tag or None)

    def resume(self, tag: str | None = None) -> None:
        """Brings the memory of a tag, or all, back at the addresses that it had."""
        self._started().resume(tag or None)

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """Returns a copy of the backup of a tensor, or with `zero_copy` the backup itself; `None` if there is none.

        There is one while the region is paused, and after a resume as long as it is retained. If any region has the
        `cpu_backup_backend` "pinned", `zero_copy` waits until the backup is page-locked.
        """
        impl = self._started()
        assert x.is_cuda, f"the tensor is on {x.device}"
        assert x.is_contiguous(), "the tensor is not contiguous"
        backup = _regions.find_backup(x)
        if backup is None:
            return None
        if not zero_copy:
            return backup.clone()
        impl.page_lock_backups()
        return backup

    # ---- options ----

    @property
    def enabled(self) -> bool:
        """True."""
        return True

    @property
    def hook_mode(self) -> HookMode:
        """The hook mode. It can be set before the first use, and not be read."""
        raise AttributeError("hook_mode can be set, and not be read")

    @hook_mode.setter
    def hook_mode(self, hook_mode: HookMode) -> None:
        assert self._impl is None, "hook_mode is set before the first use"
        self._hook_mode = hook_mode

    @property
    def memory_margin_bytes(self) -> int:
        """The free bytes that regions leave on the device when they grow."""
        return self._memory_margin_bytes

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        self._started().cdll.set_memory_margin_bytes(value)
        self._memory_margin_bytes = value

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether a resume keeps the backup, to be read, and its memory for the next pause."""
        return bool(self._started().cdll.tms_get_retain_cpu_backup())

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._started().cdll.tms_set_retain_cpu_backup(value)

    def set_disk_backup_dir(self, path: str) -> None:
        """Sets the directory for backups on disk. Creates it if it is missing."""
        impl = self._started()
        make_directory(path)
        impl.cdll.tms_set_disk_backup_dir(os.fsencode(path))

    # ---- initialization ----

    def _ensure_initialized(self) -> None:
        self._started()

    def _started(self) -> "_TorchMemorySaverImpl":
        if self._impl is None:
            install()
            self._impl = _TorchMemorySaverImpl(self._hook_mode)
        return self._impl


class _TorchMemorySaverImpl:
    """The state from the first use on."""

    def __init__(self, hook_mode: HookMode) -> None:
        self._process = ProcessRegion.asked_for()
        self._hook_util = HookUtilBase.create(hook_mode=hook_mode)
        self._binary_wrapper = BinaryWrapper(self._hook_util.get_path_binary())
        # Programs for the original package delete its pools here.
        self._mem_pools: dict[Key, MemPool] = {}
        self.graph_pools = GraphPools()
        self._route = Route()
        # Whether any backup used "mmap" memory, which each resume releases, and whether any used "pinned" memory.
        self._releases_host_memory = self._process is not None and self._uses_mmap()
        self._page_locks_backups = self._process is not None and not self._uses_mmap()

    @property
    def cdll(self) -> Any:
        return self._binary_wrapper.cdll

    @contextmanager
    def region(self, tag: str, cpu: bool, disk: bool, backend: CpuBackupBackend | None) -> Iterator[None]:
        with self._with_region_config(tag, cpu, backend, disk):
            device = _current_device()
            key = (tag, cpu, disk, (backend or self._backend()) if cpu else "", device)
            if key not in self._mem_pools:
                self._mem_pools[key] = MemPool(tag, backup_of(cpu, disk), device)
            yield

    @contextmanager
    def _with_region_config(
        self,
        tag: str,
        enable_cpu_backup: bool,
        cpu_backup_backend: CpuBackupBackend | None = None,
        enable_disk_backup: bool = False,
    ) -> Iterator[None]:
        config: Config = {
            "tag": tag,
            "interesting_region": True,
            "enable_cpu_backup": enable_cpu_backup,
            "cpu_backup_backend": cpu_backup_backend,
            "enable_disk_backup": enable_disk_backup,
        }
        with _Inside(self._binary_wrapper, self._route, config):
            self._releases_host_memory |= enable_cpu_backup and self._uses_mmap()
            self._page_locks_backups |= enable_cpu_backup and not self._uses_mmap()
            yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        import torch

        config = self._binary_wrapper.get_config()
        assert config["interesting_region"], "disable() is for the inside of a region"
        config["interesting_region"] = False
        # The pool ends with this function, and its memory is then released to the driver, not cached.
        pool = torch.cuda.MemPool()
        with _Inside(self._binary_wrapper, self._route, config, (pool, torch.cuda.current_device())):
            yield

    def pause(self, tag: str | None) -> None:
        if self._has(tag):
            if self._process is not None:
                self._process.note()
            _regions.pause(tag)

    def resume(self, tag: str | None) -> None:
        if self._has(tag):
            _regions.resume(tag)
            if self._releases_host_memory and not self.cdll.tms_get_retain_cpu_backup():
                _regions.release_idle_backups()
            if self._process is not None:
                self._process.fill()

    def page_lock_backups(self) -> None:
        if self._page_locks_backups:
            _regions.page_lock_backups()

    def _uses_mmap(self) -> bool:
        return self._backend() == "mmap"

    def _backend(self) -> str:
        return str(self._binary_wrapper.get_config()["cpu_backup_backend"])

    def _has(self, tag: str | None) -> bool:
        """Returns whether there is a region with this tag; true for `None`."""
        return tag is None or any(seen["tag"] == tag for seen in _regions.regions())


class _Inside(Inside):
    """Like lowtide's, with the thread's settings in the `tms_*` functions, and the pool of its requests."""

    def __init__(self, binary_wrapper: BinaryWrapper, route: Route, config: Config, pool: Pool | None = None) -> None:
        if config["interesting_region"]:
            backup = backup_of(config["enable_cpu_backup"], config["enable_disk_backup"])
            super().__init__(_regions.region_tag_to_c(config["tag"]), _regions.kind_to_c(backup))
        else:
            super().__init__(None, 0)
        self._binary_wrapper, self._route, self._config, self._pool = binary_wrapper, route, config, pool

    def put_in_force(self) -> End:
        with ExitStack() as stack:
            stack.callback(partial(self._binary_wrapper.set_config, **self._binary_wrapper.get_config()))
            self._binary_wrapper.set_config(**self._config)
            stack.enter_context(self._route.to(self._pool))
            # Enter last: otherwise `tms_*` could mistake the thread's present region for this one.
            end = super().put_in_force()
            return partial(_end_before, stack.pop_all(), end)


def _end_before(context: ExitStack, end: End) -> None:
    with context:
        end()


def _check_backend(enable_cpu_backup: bool, backend: CpuBackupBackend | None) -> None:
    if backend is not None and not enable_cpu_backup:
        raise ValueError("the option cpu_backup_backend requires enable_cpu_backup=True")
    if backend not in (None, *BACKENDS):
        raise ValueError(f"cpu_backup_backend is {' or '.join(BACKENDS)}, not {backend!r}")


def _current_device() -> int:
    """Returns the thread's device without initializing CUDA; 0 if CUDA is not initialized."""
    import torch

    return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else 0
