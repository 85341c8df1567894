"""Builds the wheel: maturin's backend, and before it liblowtide.so, which maturin does not know of.

maturin packs one crate's program or library. The wheel has a program, `lowtide`, and a library of another
crate that is no extension module, so this puts the library into the package's directory first.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import maturin
from maturin import build_sdist, get_requires_for_build_sdist, get_requires_for_build_wheel

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

get_requires_for_build_editable = maturin.get_requires_for_build_editable
prepare_metadata_for_build_editable = maturin.prepare_metadata_for_build_editable
prepare_metadata_for_build_wheel = maturin.prepare_metadata_for_build_wheel

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "lowtide"


def build_wheel(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    """Builds the wheel into a directory and returns its name."""
    stage()
    name: str = maturin.build_wheel(directory, settings, metadata)
    return name


def build_editable(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    """As `build_wheel`, for a wheel that refers to this directory instead of copying it."""
    stage()
    name: str = maturin.build_editable(directory, settings, metadata)
    return name


def stage() -> None:
    """Builds liblowtide.so and puts it and its header into the package's directory, which is all that is
    needed to use the package from there."""
    # A new file each time: a process may have the old one open.
    library = PACKAGE / "liblowtide.so"
    library.unlink(missing_ok=True)
    shutil.copyfile(build_library(), library)
    include = PACKAGE / "include"
    include.mkdir(exist_ok=True)
    shutil.copyfile(ROOT / "crates/capi/include/lowtide.h", include / "lowtide.h")


def build_library() -> Path:
    """Builds liblowtide.so for release and returns its path."""
    command = ["cargo", "build", "--release", "--locked", "--package", "lowtide-capi", "--lib"]
    messages = subprocess.run(
        [*command, "--message-format", "json-render-diagnostics"],
        cwd=ROOT,
        env=os.environ | {"CARGO_TERM_PROGRESS_WHEN": "never"},
        stdout=subprocess.PIPE,
        check=True,
    )
    for line in messages.stdout.splitlines():
        for file in json.loads(line).get("filenames", []):
            if Path(file).name == "liblowtide.so":
                return Path(file)
    raise RuntimeError("cargo built no liblowtide.so")


if __name__ == "__main__":
    stage()
