"""Builds the wheel: maturin's backend, and before it liblowtide.so, which maturin does not know of.

maturin packs one crate's program or library. The wheel has a program, `lowtide`, and a library of another
crate that is no extension module, so this puts the library into the package's directory first. Debug symbols are not
in the wheel: they are in `target/symbols`.

`pip wheel . --config-settings manylinux=aarch64` builds for every Linux on that processor (`stage.manylinux`).
"""

import subprocess
import sys
import tempfile
from pathlib import Path
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

from stage import NATIVE, System, manylinux, split_symbols, stage_library

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
    settings = dict(settings or {})
    system = manylinux(settings["manylinux"]) if "manylinux" in settings else NATIVE
    stage_library(system)
    name: str = maturin.build_wheel(directory, {**system.settings, **settings}, metadata)
    _split_symbols_of_command(Path(directory, name), system)
    return name


def _split_symbols_of_command(wheel: Path, system: System) -> None:
    """Moves the debug symbols of the command in a wheel into a file of their own."""
    with tempfile.TemporaryDirectory() as directory:
        change = [sys.executable, "-m", "wheel"]
        subprocess.run([*change, "unpack", wheel, "--dest", directory], check=True, stdout=subprocess.DEVNULL)
        (content,) = Path(directory).iterdir()
        (command,) = content.glob("*.data/scripts/lowtide")
        split_symbols(command, system)
        subprocess.run([*change, "pack", content, "--dest-dir", wheel.parent], check=True, stdout=subprocess.DEVNULL)


def build_editable(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    """As `build_wheel`, for a wheel that refers to this directory instead of copying it."""
    stage_library(NATIVE)
    name: str = maturin.build_editable(directory, settings, metadata)
    return name
