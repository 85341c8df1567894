"""What the package finds out, and the environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..._library import PATH


def is_xpu() -> bool:
    """Returns False: lowtide is for NVIDIA's cards."""
    return False


def get_binary_path_from_package(stem: str) -> Path:
    """Returns where liblowtide.so is, which has every function of each binary that `stem` may name."""
    return PATH


@contextmanager
def change_env(key: str, value: str) -> Iterator[None]:
    """While in it, a variable of the environment has another value."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before
