"""A release of PyTorch, as PyPI has it, on a machine without a card."""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import libraries

import stage

# What PyTorch imports, and what its tests are run by.
PACKAGES = ["typing_extensions", "sympy", "networkx", "jinja2", "fsspec", "filelock", "numpy", "setuptools", "pytest"]

# Tells backups, and `cargo xtask tidy`, that a directory can be made again: https://bford.info/cachedir.
CACHE = "Signature: 8a477f597d28d172789f06886806bc55\n"


@dataclass
class Release:
    """A PyTorch in a directory of its own, with what it takes to run it and to build against it."""

    version: str
    directory: Path

    @property
    def python(self) -> Path:
        """The interpreter that has the packages which PyTorch imports."""
        return self.directory / "venv/bin/python"

    @property
    def packages(self) -> Path:
        """Where `torch` is."""
        return self.directory / "packages"

    @property
    def cuda(self) -> Path:
        """CUDA's headers, and nothing else, in the directory `include`."""
        return self.directory / "cuda"

    def prepare(self) -> None:
        """Downloads and builds what is not there yet: a gigabyte, once."""
        done = self.directory / "done"
        if not done.exists():
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(parents=True)
            (self.directory / "CACHEDIR.TAG").write_text(CACHE)
            self._install()
            done.touch()
        self._link()

    def environment(self, package: Path) -> dict[str, str]:
        """Returns the variables of a program that is to have this PyTorch, and lowtide from a directory."""
        return {
            "PYTHONPATH": f"{self.packages}:{package}",
            "LD_LIBRARY_PATH": f"{self.directory / 'libraries'}:{self.directory / 'driver'}",
            "CUDA_HOME": str(self.cuda),
            "FAKECUDA_DEVICES": "2",
            "LOWTIDE_TEST_FAKE": "1",
        }

    def _install(self) -> None:
        subprocess.run([sys.executable, "-m", "venv", self.directory / "venv"], check=True)
        self._pip("install", *PACKAGES)
        self._pip("install", "--no-deps", "--no-compile", "--target", str(self.packages), f"torch=={self.version}")
        headers = self.directory / "headers"
        self._pip("install", "--no-deps", "--target", str(headers), *self._header_packages())
        # CUDA 12 has a directory for each part.
        for include in sorted(headers.glob("nvidia/*/include")):
            shutil.copytree(include, self.cuda / "include", dirs_exist_ok=True)
        shutil.rmtree(headers)

    def _header_packages(self) -> list[str]:
        """Returns the packages that have the headers of the CUDA that this PyTorch was built with."""
        said = (self.packages / "torch/version.py").read_text()
        found = re.search(r"cuda[^=]*= '(\d+)\.(\d+)'", said)
        if not found:
            raise RuntimeError(f"torch {self.version} was built without CUDA")
        major, minor = found.groups()
        parts = ["runtime", "cccl", "crt"]
        if int(major) < 13:
            parts = ["runtime-cu12", "cccl-cu12", "nvcc-cu12"]
        return [f"nvidia-cuda-{part}=={major}.{minor}.*" for part in parts]

    def _link(self) -> None:
        """Makes the driver, and the libraries if those that are there were made of other sources."""
        built = stage.build("--package", "lowtide-fakecuda", name="libfakecuda.so")
        driver = self.directory / "driver"
        driver.mkdir(exist_ok=True)
        if not (driver / "libcuda.so.1").exists():
            (driver / "libcuda.so.1").symlink_to(built)
        made = self.directory / "libraries"
        sources, known = libraries.sources(), made / "sources"
        if not known.exists() or known.read_text() != sources:
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            libraries.make(self.packages / "torch/lib", self.cuda / "include", made)
            known.write_text(sources)

    def _pip(self, *arguments: str) -> None:
        subprocess.run([self.python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)
