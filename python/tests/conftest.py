"""Every test looks at processes of their own: a process has one allocator, and keeps it.

They run the package that is installed. The driver is `crates/fakecuda`, whose device memory is host memory;
PyTorch is `fakes/torch`, as the real one is large and starts no CUDA on that driver.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from machine import Machine

ROOT = Path(__file__).resolve().parents[2]
FAKES = Path(__file__).resolve().parent / "fakes"

_OURS = ("FAKECUDA_", "FAKE_TORCH_", "LOWTIDE_", "PYTHON", "PYTORCH_")


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's, without anything that would tell a child what to do."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {**kept, **more}


@pytest.fixture(scope="session")
def driver_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the stand-in driver, by the name that it is looked for."""
    directory = tmp_path_factory.mktemp("driver")
    (directory / "libcuda.so.1").symlink_to(_build_fakecuda())
    return directory


def _build_fakecuda() -> str:
    command = ["cargo", "build", "--quiet", "--package", "lowtide-fakecuda", "--message-format", "json"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    files = (file for line in built.stdout.splitlines() for file in json.loads(line).get("filenames", ()))
    found: str = next(file for file in files if file.endswith("libfakecuda.so"))
    return found


@pytest.fixture
def bare(tmp_path: Path) -> Machine:
    """A machine without a driver and without PyTorch."""
    cache = tmp_path / "cache"
    directory = tmp_path / "directory"
    directory.mkdir()
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    return Machine(directory, _environment({"XDG_CACHE_HOME": str(cache), "XDG_RUNTIME_DIR": str(runtime)}))


@pytest.fixture
def gpu(bare: Machine, driver_directory: Path) -> Machine:
    """A machine with a driver, and without PyTorch."""
    bare.environment["LD_LIBRARY_PATH"] = str(driver_directory)
    return bare


@pytest.fixture
def machine(gpu: Machine) -> Machine:
    """A machine with a driver and PyTorch."""
    gpu.environment["PYTHONPATH"] = str(FAKES)
    return gpu
