"""Installs lowtide as soon as PyTorch has been imported."""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from ._errors import ConfigError, Error, NoDriverError, TorchError
from ._install import RUN_PREFIX, install, other_backend, tell
from .compat._aliases import install_those_of_environment


def install_after_torch() -> None:
    """Waits for `import torch`, and installs lowtide before that returns. So for what `LOWTIDE_COMPAT` names."""
    sys.meta_path.insert(0, _TorchFinder())
    try:
        install_those_of_environment()
    except ConfigError as error:
        tell(str(error))


class _TorchFinder:
    """Finds PyTorch where it is, and is told when it has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        # Finders of before Python 3.4 have no such function, and Python passes over them, too.
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            # Not before: an import that failed may be tried again. One that was looked up before may come after.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _install_or_exit()

        # On the loader that Python found, so that it stays what it was for everyone else.
        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def _install_or_exit() -> None:
    # `run` refuses that of the user: this is the program's own wish, or that of the script that started it.
    wish = other_backend()
    if wish is not None:
        tell(f"{wish}: this program runs without lowtide")
        return
    try:
        install()
    except NoDriverError as error:
        tell(f"{error}: the script runs without lowtide")
    except Error as error:
        if isinstance(error, TorchError) and _is_elsewhere():
            tell(f"{error}: this program runs without lowtide")
            return
        tell(str(error))
        raise SystemExit(2) from None


def _is_elsewhere() -> bool:
    """Returns whether this is a program that the script started, in an environment with a PyTorch of its own."""
    return os.environ.get(RUN_PREFIX, sys.prefix) != sys.prefix
