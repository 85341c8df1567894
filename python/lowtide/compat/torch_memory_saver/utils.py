"""The library's path, and changes of the environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..._library import PATH


def is_xpu() -> bool:
    """Returns `False`: lowtide supports only NVIDIA's GPUs."""
    return False


def get_binary_path_from_package(stem: str) -> Path:
    """Returns the path of liblowtide.so, which has the functions of every binary that `stem` may name."""
    return PATH


@contextmanager
def change_env(key: str, value: str) -> Iterator[None]:
    """A context in which an environment variable has another value."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before
