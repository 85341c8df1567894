"""Builds the wheel: maturin's backend, and before it liblowtide.so, which maturin does not know of.

maturin packs one crate's program or library. The wheel has a program, `lowtide`, and a library of another
crate that is no extension module, so this puts the library into the package's directory first.
"""

from typing import Any

import maturin
from maturin import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from stage import stage_library

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def build_wheel(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    """Builds the wheel into a directory and returns its name."""
    stage_library()
    name: str = maturin.build_wheel(directory, settings, metadata)
    return name


def build_editable(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    """As `build_wheel`, for a wheel that refers to this directory instead of copying it."""
    stage_library()
    name: str = maturin.build_editable(directory, settings, metadata)
    return name
