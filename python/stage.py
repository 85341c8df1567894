"""Builds what of the package is Rust, and puts it where this directory's package finds it.

    python3 python/stage.py
    PYTHONPATH=python python3 -m lowtide doctor

This takes cargo and nothing else; the directory can then be carried to a machine without cargo. It looks as
`pip install --target` would have left it.
"""

import json
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "lowtide"

SYMBOLS = ROOT / "target" / "symbols"
"""The debug symbols of what was staged, three quarters of its size, in a directory for each processor."""

SHIMS = ROOT / "target" / "shims"
"""The prebuilt shims, in a directory for each processor. `python/prebuild.py` builds them."""

GLIBC = "2.28"
"""The oldest C library that a portable build runs with."""


@dataclass(frozen=True)
class System:
    """A system that the package is built for, and the tools that build for it."""

    machine: str
    """The processor, as `uname -m` names it."""

    cargo: list[str]
    """The command that builds a package of this workspace for release."""

    settings: dict[str, list[str]]
    """What makes maturin do the same."""

    cc: list[str]
    """The C compiler and linker."""

    objcopy: str


NATIVE = System(platform.machine(), ["cargo", "build", "--release"], {}, ["cc"], "objcopy")
"""This system."""


def manylinux(machine: str) -> System:
    """Returns every Linux with this processor and glibc 2.28 or newer.

    Zig links for that C library. Needs what `python/requirements-release.txt` names, rustup's target, and the
    processor's binutils.
    """
    target = f"{machine}-unknown-linux-gnu"
    return System(
        machine,
        cargo=["cargo", "zigbuild", "--release", "--target", f"{target}.{GLIBC}"],
        settings={"build-args": ["--target", target, "--zig", "--compatibility", "manylinux_2_28"]},
        cc=[sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{GLIBC}"],
        objcopy=f"{machine}-linux-gnu-objcopy",
    )


def stage() -> None:
    """Puts liblowtide.so, its header and the `lowtide` command into their places."""
    stage_library(NATIVE)
    program = ROOT / "python" / "bin" / "lowtide"
    _replace(program, build("--package", "lowtide", "--bin", "lowtide", name="lowtide"))
    split_symbols(program, NATIVE)


def stage_library(system: System) -> None:
    """Puts liblowtide.so, what loads it by another name, its header, and the prebuilt shims into the package."""
    library = PACKAGE / "liblowtide.so"
    _replace(library, build("--package", "lowtide-capi", "--lib", name="liblowtide.so", system=system))
    split_symbols(library, system)
    stage_header()
    _stage_shims(system)
    _link_preloaded(system)


def stage_header() -> None:
    """Puts the library's header into the package. The shim includes it."""
    _replace(PACKAGE / "include" / "lowtide.h", ROOT / "crates/capi/include/lowtide.h")


def _stage_shims(system: System) -> None:
    target = PACKAGE / "torch" / "prebuilt"
    shutil.rmtree(target, ignore_errors=True)
    for shim in SHIMS.glob(f"{system.machine}/*.so"):
        _replace(target / shim.name, shim)


def _link_preloaded(system: System) -> None:
    """Makes the library that programs for torch_memory_saver look for beside its package, to preload it."""
    # A wheel has no symbolic links: it is empty, and takes the other with it.
    target = PACKAGE / "compat" / "torch_memory_saver_hook_mode_preload.abi3.so"
    target.unlink(missing_ok=True)
    needed = ["-Wl,--no-as-needed", "-L", str(PACKAGE), "-l:liblowtide.so", "-Wl,-rpath,$ORIGIN/.."]
    empty = ["-shared", "-nostdlib", "-x", "c", "/dev/null"]
    subprocess.run([*system.cc, *empty, *needed, "-o", str(target)], check=True)


def build(*target: str, name: str, system: System = NATIVE) -> Path:
    """Builds something for release and returns the file of this name that came of it."""
    messages = subprocess.run(
        [*system.cargo, *target, "--message-format", "json-render-diagnostics"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for line in messages.stdout.splitlines():
        for file in json.loads(line).get("filenames", []):
            if Path(file).name == name:
                return Path(file)
    raise RuntimeError(f"cargo built no {name}")


def _replace(target: Path, source: Path) -> None:
    """Copies a file. The target is a new one each time: a process may have the old one open."""
    target.parent.mkdir(exist_ok=True)
    target.unlink(missing_ok=True)
    shutil.copy(source, target)


def split_symbols(program: Path, system: System) -> None:
    """Moves the debug symbols of a program or library into a file of their own. The names of functions stay."""
    symbols = SYMBOLS / system.machine / f"{program.name}.debug"
    symbols.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([system.objcopy, "--only-keep-debug", program, symbols], check=True)
    subprocess.run([system.objcopy, "--strip-debug", f"--add-gnu-debuglink={symbols}", program], check=True)


if __name__ == "__main__":
    stage()
