"""Builds what of the package is Rust, and puts it where this directory's package finds it.

    python3 python/stage.py
    PYTHONPATH=python python3 -m lowtide doctor

This takes cargo and nothing else; the directory can then be carried to a machine without cargo. It looks as
`pip install --target` would have left it.
"""

import json
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "lowtide"

SYMBOLS = ROOT / "target" / "symbols"
"""The debug symbols of what was staged, three quarters of its size. A debugger finds them beside the program."""


def stage() -> None:
    """Puts liblowtide.so, its header and the `lowtide` command into their places."""
    stage_library()
    program = ROOT / "python" / "bin" / "lowtide"
    _replace(program, build("--package", "lowtide", "--bin", "lowtide", name="lowtide"))
    split_symbols(program)


def stage_library() -> None:
    """Puts liblowtide.so, its header, and what loads it by another name into the package."""
    library = PACKAGE / "liblowtide.so"
    _replace(library, build("--package", "lowtide-capi", "--lib", name="liblowtide.so"))
    split_symbols(library)
    _replace(PACKAGE / "include" / "lowtide.h", ROOT / "crates/capi/include/lowtide.h")
    link_preloaded()


def link_preloaded() -> None:
    """Makes the library that programs for torch_memory_saver look for beside its package, to preload it."""
    # A wheel has no symbolic links: it is empty, and takes the other with it.
    target = PACKAGE / "compat" / "torch_memory_saver_hook_mode_preload.abi3.so"
    target.unlink(missing_ok=True)
    needed = ["-Wl,--no-as-needed", "-L", str(PACKAGE), "-l:liblowtide.so", "-Wl,-rpath,$ORIGIN/.."]
    subprocess.run(["cc", "-shared", "-nostdlib", "-o", str(target), *needed], check=True)


def build(*target: str, name: str) -> Path:
    """Builds something for release and returns the file of this name that came of it."""
    command = ["cargo", "build", "--release", *target]
    messages = subprocess.run(
        [*command, "--message-format", "json-render-diagnostics"], cwd=ROOT, stdout=subprocess.PIPE, check=True
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


def split_symbols(program: Path) -> None:
    """Moves the debug symbols of a program or library into a file of their own. The names of functions stay."""
    SYMBOLS.mkdir(parents=True, exist_ok=True)
    symbols = SYMBOLS / f"{program.name}.debug"
    subprocess.run(["objcopy", "--only-keep-debug", program, symbols], check=True)
    subprocess.run(["objcopy", "--strip-debug", f"--add-gnu-debuglink={symbols}", program], check=True)


if __name__ == "__main__":
    stage()
