"""Installs lowtide as soon as PyTorch has been imported."""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from ._categories import categorize_all_if_asked
from ._errors import ConfigError, Error, NoDriverError, TorchError, report_line
from ._install import RUN_PREFIX, install, other_backend, report_active
from .compat._aliases import install_those_of_environment


def install_after_torch() -> None:
    """Installs lowtide when PyTorch is imported, and the packages that `LOWTIDE_COMPAT` names when they are."""
    sys.meta_path.insert(0, _TorchFinder())
    try:
        install_those_of_environment()
    except ConfigError as error:
        report_line(str(error))


class _TorchFinder:
    """A finder for `torch` that installs lowtide once the import has succeeded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        # Finders written for Python before 3.4 have no `find_spec`; Python skips them, too.
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            # Only now: a failed import may be tried again. A second look-up may come before the first import has ended.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                install_or_exit()

        # Patch the loader that Python found, so that the module keeps its own loader.
        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def install_or_exit() -> None:
    """Installs lowtide in PyTorch. Ends the process if it cannot, unless the process can do without.

    What is wrong is one line on standard error.
    """
    # `run` rejects this setting in the user's environment. Here the program, or the script that started it, set it.
    wish = other_backend()
    if wish is not None:
        report_line(f"{wish}: this program runs without lowtide")
        return
    try:
        install()
        categorize_all_if_asked()
        report_active()
    except NoDriverError as error:
        report_line(f"{error}: the script runs without lowtide")
    except Error as error:
        if isinstance(error, TorchError) and _is_elsewhere():
            report_line(f"{error}: this program runs without lowtide")
            return
        report_line(str(error))
        raise SystemExit(2) from None


def _is_elsewhere() -> bool:
    """Returns whether this process runs in another Python environment than the script that started it."""
    return os.environ.get(RUN_PREFIX, sys.prefix) != sys.prefix
