"""Shims that came with the package, and when one is built instead. They are stand-ins, for `fakes/torch`."""

import ast
import os
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest
from machine import Machine

from lowtide._install import SHIM_MAX, SHIM_MIN
from lowtide.torch import build

ROOT = Path(__file__).resolve().parents[2]

SHIM = """
    #include <stdbool.h>
    const char *lowtide_torch_install(void) { return 0; }
    bool lowtide_torch_is_installed(void) { return true; }
    int lowtide_torch_pause(const char *tag, bool keep) { return 0; }
    int lowtide_torch_resume(const char *tag) { return 0; }
    const char *lowtide_torch_change_error(void) { return ""; }
"""

# The package has the shims of this directory, and prints which one it takes.
PREBUILT = """
    from pathlib import Path
    from lowtide.torch import build
    build.PREBUILT = Path("prebuilt").absolute()
"""
TAKEN = "print(build.build()._name)\n"


@pytest.fixture
def shims(machine: Machine) -> Machine:
    """A machine with the compiled stand-in, `shim.so`, and nothing to compile another one with."""
    machine.write("shim.c", SHIM)
    (machine.directory / "prebuilt").mkdir()
    command = ["cc", "-shared", "-fPIC", "shim.c", "-o", "shim.so"]
    subprocess.run(command, cwd=machine.directory, check=True)
    machine.environment["CXX"] = "/bin/false"
    return machine


def add(machine: Machine, version: str, commit: str, processor: str = "", abi: bool = True) -> Path:
    """Gives a machine's package the shim for a PyTorch, and returns its path."""
    name = build.prebuilt_name(version, commit, processor or os.uname().machine, abi)
    shim = machine.directory / "prebuilt" / name
    shim.write_bytes((machine.directory / "shim.so").read_bytes())
    return shim


# What of a PyTorch makes no difference.
@pytest.mark.parametrize(("version", "cuda"), [("2.11.0+cu130", "13.0"), ("2.11.0+cu126", "12.6"), ("2.11.0", "12.8")])
def test_a_prebuilt_shim_needs_no_compiler_and_no_header(shims: Machine, version: str, cuda: str) -> None:
    shim = add(shims, "2.11.0", "0")
    taken = shims.code(PREBUILT, TAKEN, FAKE_TORCH_VERSION=version, FAKE_TORCH_CUDA=cuda)
    assert taken == f"{shim}\n"
    assert not Path(shims.environment["XDG_CACHE_HOME"]).exists()


@pytest.mark.parametrize(
    ("version", "commit", "processor", "abi"),
    [
        ("2.11.1", "0", "", True),
        ("2.11.0", "1", "", True),
        ("2.11.0", "0", "riscv64", True),
        ("2.11.0", "0", "", False),
    ],
)
def test_a_shim_for_another_pytorch_is_not_taken(
    shims: Machine, version: str, commit: str, processor: str, abi: bool
) -> None:
    add(shims, version, commit, processor, abi)
    assert shims.code(PREBUILT, "print(build.prebuilt())\n") == "None\n"


@pytest.mark.parametrize("file", ["SOURCES / 'allocator.h'", "INCLUDE / 'lowtide.h'"])
def test_a_shim_of_other_sources_is_not_taken(shims: Machine, file: str) -> None:
    add(shims, "2.11.0", "0")
    change = f"""
        import shutil
        from lowtide.torch import build
        for name in ("SOURCES", "INCLUDE"):
            shutil.copytree(getattr(build, name), name)
            setattr(build, name, Path(name))
        print(build.prebuilt() is None)
        path = build.{file}
        path.write_bytes(path.read_bytes() + b"\\n")
        print(build.prebuilt() is None)
    """
    assert shims.code(PREBUILT, change) == "False\nTrue\n"


@pytest.fixture
def compiler(shims: Machine) -> Machine:
    """That machine, with CUDA's headers and a compiler that makes the stand-in of anything."""
    for name in ("cuda_runtime_api.h", "crt/host_defines.h"):
        shims.write(f"cuda/include/{name}", "")
    shims.write("c++", '#!/bin/sh\nfor output; do :; done\ncp shim.so "$output"\n')
    (shims.directory / "c++").chmod(0o755)
    shims.environment.update(CUDA_HOME=str(shims.directory / "cuda"), CXX="./c++")
    return shims


def test_a_shim_that_is_not_prebuilt_is_built(compiler: Machine) -> None:
    add(compiler, "2.12.0", "0")
    done = compiler.run("-c", dedent(PREBUILT) + TAKEN)
    cache = Path(compiler.environment["XDG_CACHE_HOME"])
    assert Path(done.stdout.strip()).parent.parent == cache / "lowtide"
    assert "building the shim for torch-2.11.0+cu130, once" in done.stderr


def test_a_prebuilt_shim_that_cannot_be_loaded_is_named(shims: Machine) -> None:
    shim = add(shims, "2.11.0", "0")
    shim.write_bytes(b"")
    done = shims.run("-c", dedent(PREBUILT) + TAKEN)
    assert f"BuildError: the shim cannot be loaded ({shim}: file too short): remove {shim}\n" in done.stderr


def test_doctor_says_which_it_is(compiler: Machine) -> None:
    ask = "from lowtide._doctor import _shim\nprint([check.found for check in _shim()][-1])\n"
    assert compiler.code(PREBUILT, ask).startswith("not built yet: ")
    compiler.code(PREBUILT, TAKEN)
    assert compiler.code(PREBUILT, ask).startswith("built: ")
    shim = add(compiler, "2.11.0", "0")
    compiler.environment["CUDA_HOME"] = "/nonexistent"
    assert compiler.code(PREBUILT, ask) == f"prebuilt: {shim}\n"


def test_every_supported_release_is_prebuilt() -> None:
    tree = ast.parse((ROOT / "python" / "prebuild.py").read_text())
    (releases,) = (
        ast.literal_eval(line.value)
        for line in tree.body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "RELEASES"
    )
    assert SHIM_MIN[0] == SHIM_MAX[0]
    minors = {tuple(int(number) for number in release.split(".")[:2]) for release in releases}
    assert minors == {(SHIM_MIN[0], minor) for minor in range(SHIM_MIN[1], SHIM_MAX[1] + 1)}
