"""Installs lowtide at Python's start: `lowtide run` puts this directory on `PYTHONPATH`."""

import importlib
import sys
from pathlib import Path


def _import_hidden() -> None:
    """Imports the `sitecustomize` that Python would have imported without this one."""
    this = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = this


def _start() -> None:
    directory = Path(__file__).resolve().parent
    # The script gets the `sys.path` that it has without lowtide. Its children read `PYTHONPATH`.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != directory]
    # The script may start programs with any Python. An older one reads no other file of lowtide.
    if sys.version_info < (3, 10):  # noqa: UP036
        return
    # The package's directory may be missing from `sys.path`, as in a child with another environment.
    package_parent = str(directory.parent.parent)
    sys.path.insert(0, package_parent)
    try:
        from lowtide._hook import install_after_torch
    finally:
        sys.path.remove(package_parent)
    install_after_torch()


try:
    _start()
finally:
    _import_hidden()
