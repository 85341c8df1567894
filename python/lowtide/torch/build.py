"""The shim for the PyTorch at hand: built once for each, and kept.

No two versions of PyTorch share the layout of the class that the shim is, so it is built where it is used. It
takes a C++ compiler and CUDA's headers, which PyTorch's own wheels bring with them, but neither ninja nor
Python's headers, as `torch.utils.cpp_extension` would.
"""

import ctypes
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .._errors import Error
from .._files import locked, private_directory, read_own, write
from .._library import INCLUDE, library

SOURCES = Path(__file__).parent / "csrc"
"""Where the C++ of the shim is."""


class BuildError(Error):
    """The shim could not be built. The message is one line."""


def build() -> ctypes.CDLL:
    """Returns the shim for the PyTorch of this process, loaded. Builds it if no process of this user has.

    Installs nothing. Takes ten seconds to a minute the first time, and is safe in many processes at once.
    Raises `BuildError` where there is no compiler, where headers are missing, where it does not compile, or where
    another user could have put code in its place.
    """
    # Its functions are what the shim looks for when it is loaded.
    library()
    arguments, shim = _plan()
    try:
        # From here on nobody else can change what lies there: what is checked is what is loaded.
        shim = private_directory(shim.parent) / shim.name
        if not is_whole(shim):
            _build_once(arguments, shim)
    except OSError as error:
        raise _unkept(error) from None
    try:
        loaded = ctypes.CDLL(str(shim))
    except OSError as error:
        raise BuildError(f"the shim cannot be loaded ({error}): remove {shim.parent}") from None
    loaded.lowtide_torch_install.restype = ctypes.c_char_p
    loaded.lowtide_torch_is_installed.restype = ctypes.c_bool
    loaded.lowtide_torch_pause.argtypes = [ctypes.c_char_p, ctypes.c_bool]
    loaded.lowtide_torch_resume.argtypes = [ctypes.c_char_p]
    loaded.lowtide_torch_change_error.restype = ctypes.c_char_p
    return loaded


def find() -> Path | None:
    """Returns where the shim for the PyTorch of this process is, if it is built.

    Raises `BuildError` where headers are missing, or there is no place for it.
    """
    _, shim = _plan()
    try:
        return shim if shim.exists() and is_whole(private_directory(shim.parent) / shim.name) else None
    except OSError as error:
        raise _unkept(error) from None


def is_whole(shim: Path) -> bool:
    """Returns whether a shim is as it was built, by the SHA-256 in the file beside it.

    A machine that lost its power, or a disk that was full, leaves less, or zeros, and to load that may end the process.
    Raises `UnsafeError` where one of the two is another user's.
    """
    content, expected = read_own(shim), read_own(_checksum_file(shim))
    return content is not None and expected is not None and _checksum(content) == expected


def cache_directory() -> Path:
    """Returns the directory in which shims are kept: `lowtide` in `$XDG_CACHE_HOME`, or in `~/.cache`.

    Raises `BuildError` for a user without a home directory, as some containers have.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # By its specification one that is not absolute, which would be another in each directory, is none.
        return (base if base.is_absolute() else Path.home() / ".cache") / "lowtide"
    except RuntimeError as error:
        raise BuildError(f"there is no place for the shim ({error}): set XDG_CACHE_HOME to one") from None


def compiler() -> list[str]:
    """Returns the command of the C++ compiler: `$CXX`, or the first of the usual ones that is there."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX names no C++ compiler ({error}): {os.environ['CXX']}") from None
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]) is not None:
            return command
    if named:
        raise BuildError(f"the C++ compiler that CXX names, {named[0]}, is not there")
    raise BuildError("there is no C++ compiler: install g++, or set CXX to one")


def cuda_includes() -> list[Path]:
    """Returns the directories to look for CUDA's headers in, first the one that the user names."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    wheels = [path for root in _package_roots("nvidia") for path in (*root.glob("cu[0-9]*"), root / "cuda_runtime")]
    # Those of NVIDIA's wheels lack some that all others include, and Triton has.
    triton = [root / "backends" / "nvidia" for root in _package_roots("triton")]
    roots = [*homes, *sorted(wheels, reverse=True), *_conda_roots(), Path("/usr/local/cuda"), *triton]
    found = [root / "include" for root in roots if (root / "include").is_dir()]
    for header in ("cuda_runtime_api.h", "crt/host_defines.h"):
        if not any((directory / header).exists() for directory in found):
            raise BuildError(f"CUDA's header {header} is not there: set CUDA_HOME to where the CUDA toolkit is")
    return found


def compile_arguments(root: Path, version: str, abi: bool = True) -> list[str]:
    """Returns what the compiler is given for a PyTorch's headers.

    `root` is the directory of the package `torch`, `abi` whether its C++ strings are those of C++11.
    """
    major, minor = (int(number) for number in version.split(".")[:2])
    return [
        # What PyTorch's headers are written in.
        "-std=c++20" if (major, minor) >= (2, 14) else "-std=c++17",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(abi)}",
        # Hidden, so that the shim's own functions call each other directly.
        *("-O2", "-fPIC", "-fvisibility=hidden"),
        *(argument for path in [root / "include", *cuda_includes()] for argument in ("-isystem", str(path))),
        *("-I", str(INCLUDE)),
        str(SOURCES / "shim.cpp"),
    ]


def _link_arguments(root: Path) -> list[str]:
    # CUDA's runtime is found through PyTorch's libraries, lowtide's functions in what is loaded.
    return ["-shared", "-L", str(root / "lib"), "-lc10", "-lc10_cuda", "-ltorch_cuda"]


def _conda_roots() -> list[Path]:
    # CUDA of conda-forge is in the environment itself, what is for a platform apart. Not in any: a compiler that is
    # told of /usr/include no longer finds its own headers.
    prefix = Path(sys.prefix)
    if not (prefix / "conda-meta").is_dir():
        return []
    return [*sorted(prefix.glob("targets/*-linux"), reverse=True), prefix]


def _package_roots(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    return [] if spec is None else [Path(path) for path in spec.submodule_search_locations or ()]


def _plan() -> tuple[list[str], Path]:
    """Returns the compiler's arguments for the PyTorch of this process, and where the shim is to be."""
    import torch

    root, abi = Path(torch.__file__).parent, torch.compiled_with_cxx11_abi()
    arguments = [*compile_arguments(root, torch.__version__, abi), *_link_arguments(root)]
    return arguments, cache_directory() / f"torch-{torch.__version__}-{_fingerprint(torch, arguments)}" / "shim.so"


def _fingerprint(torch: Any, arguments: list[str]) -> str:
    """Returns what tells apart shims of one version of PyTorch."""
    digest = hashlib.sha256()
    for text in (torch.version.git_version, torch.version.cuda, os.uname().machine, *arguments):
        digest.update(f"{text}\0".encode())
    for source in (INCLUDE / "lowtide.h", *sorted(SOURCES.iterdir())):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _checksum_file(shim: Path) -> Path:
    return shim.with_suffix(".so.sha256")


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _unkept(error: OSError) -> BuildError:
    return BuildError(
        f"the shim cannot be kept ({error}): set XDG_CACHE_HOME to a directory to which only you may write, below none "
        "of another user's"
    )


def _build_once(arguments: list[str], shim: Path) -> None:
    """Builds the shim unless another process does meanwhile."""
    with locked(shim.parent / "lock"):
        if not is_whole(shim):
            _compile(arguments, shim)


def _compile(arguments: list[str], shim: Path) -> None:
    command = compiler()
    with tempfile.TemporaryDirectory(dir=shim.parent) as directory:
        output = Path(directory) / shim.name
        made = subprocess.run([*command, *arguments, "-o", str(output)], capture_output=True, text=True, check=False)
        if made.returncode != 0:
            log = shim.with_suffix(".log")
            write(log, made.stderr.encode())
            lines = made.stderr.splitlines() or [f"exit code {made.returncode}"]
            first = next((line for line in lines if "error" in line), lines[0])
            raise BuildError(f"the shim does not compile with {command[0]}: {first} (the rest is in {log})")
        content = output.read_bytes()
    # Whoever does not wait for the lock sees the two fit, or builds.
    write(shim, content)
    write(_checksum_file(shim), _checksum(content))
