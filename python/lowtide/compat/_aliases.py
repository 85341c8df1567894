"""Aliases: modules of this package under the names of other packages."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

from .._errors import ConfigError, Error
from ._variables import read_variables

VARIABLE = "LOWTIDE_COMPAT"
"""The variable with the packages that lowtide replaces, like `torch_memory_saver,vllm`."""

TORCH_MEMORY_SAVER = "torch_memory_saver"
CUMEM = "vllm.device_allocator.cumem"
_SUBMODULES = (
    "binary_wrapper",
    "entrypoint",
    "hooks",
    "hooks.base",
    "hooks.mode_preload",
    "hooks.mode_torch",
    "testing_utils",
    "utils",
)


def install_as_torch_memory_saver() -> None:
    """Makes `import torch_memory_saver`, and its submodules, import `lowtide.compat.torch_memory_saver` from now on.

    Raises `Error` if the other package has been imported, because its importers would keep using it.
    """
    ours = f"{__package__}.{TORCH_MEMORY_SAVER}"
    _alias(TORCH_MEMORY_SAVER, ours)
    for name in _SUBMODULES:
        _alias(f"{TORCH_MEMORY_SAVER}.{name}", f"{ours}.{name}")


def install_as_vllm_cumem() -> None:
    """Makes `import vllm.device_allocator.cumem` import `lowtide.compat.vllm` from now on.

    Raises `Error` if vLLM's module has been imported, because its importers would keep using it.
    """
    _alias(CUMEM, f"{__package__}.vllm")


def is_installed_as_torch_memory_saver() -> bool:
    """Returns whether `import torch_memory_saver` imports lowtide's in this process."""
    return sys.modules.get(TORCH_MEMORY_SAVER) is sys.modules.get(f"{__package__}.{TORCH_MEMORY_SAVER}")


def install_those_of_environment() -> None:
    """Makes imports of the packages in `LOWTIDE_COMPAT` import lowtide's. Imports nothing itself.

    Raises `ConfigError` for an unknown package.
    """
    for name in names_of_environment():
        sys.meta_path.insert(0, _Finder(*_BY_NAME[name]))


def names_of_environment() -> list[str]:
    """Returns the packages in `LOWTIDE_COMPAT`. Raises `ConfigError` for an unknown one."""
    names = list(filter(None, os.environ.get(VARIABLE, "").split(",")))
    for name in names:
        if name not in _BY_NAME:
            known = ", ".join(_BY_NAME)
            raise ConfigError(f"{VARIABLE} names {name!r}, of which lowtide has no counterpart: it has {known}")
    return names


def check_environment() -> None:
    """Raises `ConfigError` for an unknown package in `LOWTIDE_COMPAT`, or an invalid variable of a package in it."""
    if TORCH_MEMORY_SAVER in names_of_environment():
        read_variables()


def _alias(name: str, ours: str) -> None:
    module = importlib.import_module(ours)
    present = sys.modules.setdefault(name, module)
    if present is not module:
        raise Error(f"{name} has been imported already: call lowtide.compat.install_as_* before that")


class _Finder:
    """A finder of one module under another package's name, until its import has succeeded."""

    def __init__(self, name: str, install: Callable[[], None]) -> None:
        self._name, self._install = name, install

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(name, _Loader(self._import)) if name == self._name else None

    def _import(self) -> ModuleType:
        self._install()
        # Only now: a failed import may be tried again, and would find the other package. A second look-up may have come
        # before the first import ended.
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        return sys.modules[self._name]


class _Loader(Loader):
    """A loader that imports a module by its own name, and keeps its own spec."""

    def __init__(self, import_: Callable[[], ModuleType]) -> None:
        self._import = import_

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = self._import()
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Python has set the spec of the other name.
        module.__spec__ = self._own_spec


_BY_NAME = {
    "torch_memory_saver": (TORCH_MEMORY_SAVER, install_as_torch_memory_saver),
    "vllm": (CUMEM, install_as_vllm_cumem),
}
