"""Python imports this when it starts, because `python -m lowtide run` put its directory on `PYTHONPATH`."""

import importlib
import sys
from pathlib import Path


def _import_hidden() -> None:
    """Imports the `sitecustomize` that would have been found without this one."""
    this = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = this


def _start() -> None:
    directory = Path(__file__).resolve().parent
    # The script sees the path that it would see without lowtide. Its children look at the environment.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != directory]
    # Programs that the script starts may be of any Python. This file is all that an older one reads of lowtide.
    if sys.version_info < (3, 10):  # noqa: UP036
        return
    # Where the package was found may be nowhere on this path, like the directory of the first Python.
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
