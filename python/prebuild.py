"""Builds the shims that the wheel has, so that no compiler is needed where it is installed.

    cargo xtask shims x86_64 aarch64

There is one for each release of PyTorch and each processor, in `target/shims`. The next build of the package takes
those of its processor. Needs the processor's g++ (on Debian, g++ and g++-aarch64-linux-gnu), and what
`python/requirements-release.txt` names. The first run downloads the releases from PyPI, 7 GB, and keeps their headers
in `target/torch`, 700 MB.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from lowtide.torch import build
from stage import ROOT, SHIMS, manylinux, stage_header

RELEASES = [
    "2.8.0",
    "2.9.0",
    "2.9.1",
    "2.10.0",
    "2.11.0",
    "2.12.0",
    "2.12.1",
    "2.13.0",
    "2.14.0",
    "2.14.1",
    "2.15.0",
]
"""The releases on PyPI. Patch releases have shims of their own: 2.9.1 changed headers of 2.9.0."""

HEADERS = ROOT / "target" / "torch"

CUDA_HEADERS = ["nvidia-cuda-runtime==13.0.*", "nvidia-cuda-cccl==13.0.*", "nvidia-cuda-crt==13.0.*"]

NEWER_LIBRARIES = Path(__file__).with_suffix(".cpp")

# Tells backups, and `cargo xtask tidy`, that a directory can be made again: https://bford.info/cachedir.
CACHE = "Signature: 8a477f597d28d172789f06886806bc55\n"

EXPORTED = "{ global: lowtide_torch_*; local: *; };\n"

_FOUND_LATER = re.compile(r"lowtide_|cuda[A-Z]|_Z(T[ISV])?N?K?(3c10|2at|5torch)")
"""The functions of liblowtide.so, CUDA and PyTorch, which the shim is linked without."""


def main() -> None:
    """Builds the shims for the processors that are asked for."""
    if len(sys.argv) < 2:
        sys.exit("usage: prebuild.py MACHINE...\n\nMACHINE is x86_64 or aarch64")
    stage_header()
    os.environ["CUDA_HOME"] = str(cuda_headers())
    roots = [torch_headers(version) for version in RELEASES]
    for machine in sys.argv[1:]:
        shutil.rmtree(SHIMS / machine, ignore_errors=True)
        (SHIMS / machine).mkdir(parents=True)
        for root in roots:
            print(prebuild(root, machine), flush=True)


def torch_headers(version: str) -> Path:
    """Returns the directory of the package `torch` of a release, with its headers and its version alone.

    They are those of x86-64. The headers that the shim includes are the same for other processors.
    """
    directory = HEADERS / version
    if not (directory / "torch" / "version.py").exists():
        with tempfile.TemporaryDirectory() as downloads:
            where = ["--platform", "manylinux_2_28_x86_64", "--python-version", "3.12", "--dest", downloads]
            _pip("download", "--no-cache-dir", "--only-binary", ":all:", *where, f"torch=={version}")
            (wheel,) = Path(downloads).iterdir()
            _unpack_headers(wheel, directory)
    return directory / "torch"


def _unpack_headers(wheel: Path, directory: Path) -> None:
    HEADERS.mkdir(parents=True, exist_ok=True)
    (HEADERS / "CACHEDIR.TAG").write_text(CACHE)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(directory, [name for name in packed.namelist() if name.startswith("torch/include/")])
        # Last: then the headers are whole.
        packed.extract("torch/version.py", directory)


def cuda_headers() -> Path:
    """Returns a directory with CUDA's headers in its `include`."""
    home = HEADERS / "cuda"
    if not home.exists():
        with tempfile.TemporaryDirectory() as packages:
            _pip("install", "--target", packages, *CUDA_HEADERS)
            (found,) = Path(packages).glob("nvidia/*/include")
            shutil.copytree(found, home / "include")
    return home


def prebuild(root: Path, machine: str) -> Path:
    """Builds the shim for the headers of a PyTorch, and returns its path."""
    said = (root / "version.py").read_text()
    version, commit = (re.search(rf"^{name} = '(.+)'$", said, re.M) for name in ("__version__", "git_version"))
    if not version or not commit:
        raise RuntimeError(f"{root}/version.py does not say which PyTorch it is")
    shim = SHIMS / machine / build.prebuilt_name(version[1], commit[1], machine)
    with tempfile.TemporaryDirectory() as directory:
        # Messages name source files, and not where those were here.
        paths = [f"-ffile-prefix-map={path}/=" for path in (ROOT, root.parent)]
        objects = _compile([*paths, *build.compile_arguments(root, version[1])], machine, Path(directory))
        _link(objects, machine, Path(directory), shim)
    _check_symbols(shim, machine)
    return shim


def _compile(arguments: list[str], machine: str, directory: Path) -> list[str]:
    *flags, source = arguments
    objects = [str(directory / "shim.o"), str(directory / "newer.o")]
    for file, output in zip([source, str(NEWER_LIBRARIES)], objects, strict=True):
        subprocess.run([f"{machine}-linux-gnu-g++", *flags, "-c", file, "-o", output], check=True)
    return objects


def _link(objects: list[str], machine: str, directory: Path, shim: Path) -> None:
    """Links as `lowtide.torch.build` does, with libraries that have PyTorch's names and nothing else."""
    cc = manylinux(machine).cc
    (directory / "lib").mkdir()
    for name in ("libc10.so", "libc10_cuda.so", "libtorch_cuda.so"):
        empty = ["-shared", "-nostdlib", f"-Wl,-soname,{name}", "-x", "c", "/dev/null"]
        subprocess.run([*cc, *empty, "-o", str(directory / "lib" / name)], check=True)
    exported = directory / "exported.map"
    exported.write_text(EXPORTED)
    options = ["-Wl,-s", "-Wl,--gc-sections", "-Wl,--no-as-needed", f"-Wl,--version-script={exported}"]
    # GCC's libraries by their paths: Zig would take its own in their place.
    libraries = [_library_of_gcc(name, machine) for name in ("libstdc++.so", "libgcc_s.so.1")]
    arguments = [*options, *objects, *build.link_arguments(directory), *libraries]
    subprocess.run([*cc, *arguments, "-o", str(shim)], check=True)


def _library_of_gcc(name: str, machine: str) -> str:
    command = [f"{machine}-linux-gnu-g++", f"-print-file-name={name}"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def _check_symbols(shim: Path, machine: str) -> None:
    """Checks that the C library and GCC's have everything that PyTorch does not have.

    The linker takes an undefined symbol for one of PyTorch's.
    """
    command = [f"{machine}-linux-gnu-nm", "--dynamic", "--undefined-only", str(shim)]
    symbols = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    names = re.findall(r"^ *U (\S+)$", symbols, re.M)
    unknown = [name for name in names if "@" not in name and not _FOUND_LATER.match(name)]
    if unknown:
        raise RuntimeError(f"{shim.name} needs {unknown[0]}, which manylinux_2_28 lacks: add it to {NEWER_LIBRARIES}")


def _pip(*arguments: str) -> None:
    command, *rest = arguments
    subprocess.run([sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *rest], check=True)


if __name__ == "__main__":
    main()
