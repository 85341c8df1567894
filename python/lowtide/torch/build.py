"""The shim for the installed PyTorch: prebuilt in the wheel, or built once for each version, and cached.

Every version of PyTorch lays out the allocator class differently, so each has a shim of its own. The wheel has those of
PyTorch's releases (`python/prebuild.py`). For another PyTorch the shim is built where it is used. That needs a C++
compiler and CUDA's headers, which PyTorch's wheels depend on. Unlike `torch.utils.cpp_extension`, it needs neither
ninja nor Python's headers.
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
import time
from pathlib import Path

from .._errors import Error, report_line
from .._files import locked, private_directory, read_own, write
from .._library import INCLUDE, library

SOURCES = Path(__file__).parent / "csrc"
"""The directory of the shim's C++ sources."""

PREBUILT = Path(__file__).parent / "prebuilt"
"""The directory of the shims that came with the package."""


class BuildError(Error):
    """The shim could not be built. The message is one line."""


def build() -> ctypes.CDLL:
    """Returns the loaded shim for this process's PyTorch.

    Builds it if it is not prebuilt and no process of this user has built it. Installs nothing. A build takes ten
    seconds to a minute, and is safe in many processes at once.
    Raises `BuildError` if there is no compiler, headers are missing, the compilation fails, or another user could have
    replaced the code.
    """
    # The shim's undefined symbols are found in this library.
    library()
    shim = prebuilt() or _built()
    try:
        loaded = ctypes.CDLL(str(shim))
    except OSError as error:
        raise BuildError(f"the shim cannot be loaded ({error}): remove {shim}") from None
    loaded.lowtide_torch_install.restype = ctypes.c_char_p
    loaded.lowtide_torch_is_installed.restype = ctypes.c_bool
    loaded.lowtide_torch_pause.argtypes = [ctypes.c_char_p, ctypes.c_bool]
    loaded.lowtide_torch_resume.argtypes = [ctypes.c_char_p]
    loaded.lowtide_torch_change_error.restype = ctypes.c_char_p
    return loaded


def prebuilt() -> Path | None:
    """Returns the path of the shim that came with the package for this process's PyTorch, or `None` if none did."""
    import torch

    abi = torch.compiled_with_cxx11_abi()
    shim = PREBUILT / prebuilt_name(torch.__version__, torch.version.git_version, os.uname().machine, abi)
    return shim if shim.exists() else None


def prebuilt_name(version: str, commit: str, machine: str, abi: bool = True) -> str:
    """Returns the file name of the prebuilt shim for a commit of PyTorch.

    The name has a hash of everything that decides how the shim is compiled, CUDA's version aside. The headers of CUDA
    12.6 to 13.2 compile to the same code, because the shim only needs CUDA's oldest functions.
    """
    release = version.partition("+")[0]
    return f"torch-{release}-{_fingerprint(commit, machine, *_flags(version, abi))}.so"


def find() -> Path | None:
    """Returns the path of the built shim for this process's PyTorch, or `None` if it is not built.

    Raises `BuildError` if headers are missing or the cache directory is unusable.
    """
    _, shim = _plan()
    try:
        return shim if shim.exists() and is_whole(private_directory(shim.parent) / shim.name) else None
    except OSError as error:
        raise _unkept(error) from None


def is_whole(shim: Path) -> bool:
    """Returns whether a shim has the SHA-256 in the file beside it.

    A power failure or a full disk may leave a truncated file, or zeros. Loading such a file may end the process.
    Raises `UnsafeError` if another user owns one of the two files.
    """
    content, expected = read_own(shim), read_own(_checksum_file(shim))
    return content is not None and expected is not None and _checksum(content) == expected


def cache_directory() -> Path:
    """Returns the cache directory for shims: `lowtide` in `$XDG_CACHE_HOME`, else in `~/.cache`.

    Raises `BuildError` for a user without a home directory, as some containers have.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # Its specification says to ignore a path that is not absolute.
        return (base if base.is_absolute() else Path.home() / ".cache") / "lowtide"
    except RuntimeError as error:
        raise BuildError(f"there is no place for the shim ({error}): set XDG_CACHE_HOME to one") from None


def compiler() -> list[str]:
    """Returns the command of the C++ compiler: `$CXX`, else the first of the usual ones on `PATH`."""
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
    """Returns the include directories for CUDA's headers, the user's own first."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    wheels = [path for root in _package_roots("nvidia") for path in (*root.glob("cu[0-9]*"), root / "cuda_runtime")]
    # NVIDIA's wheels lack some headers that the others include. Triton's package has those.
    triton = [root / "backends" / "nvidia" for root in _package_roots("triton")]
    roots = [*homes, *sorted(wheels, reverse=True), *_conda_roots(), Path("/usr/local/cuda"), *triton]
    found = [root / "include" for root in roots if (root / "include").is_dir()]
    for header in ("cuda_runtime_api.h", "crt/host_defines.h"):
        if not any((directory / header).exists() for directory in found):
            raise BuildError(f"CUDA's header {header} is not there: set CUDA_HOME to where the CUDA toolkit is")
    return found


def compile_arguments(root: Path, version: str, abi: bool = True) -> list[str]:
    """Returns the compiler's arguments for the headers of a PyTorch.

    `root` is the directory of the package `torch`, `abi` whether it uses the C++11 ABI of strings.
    """
    includes = [root / "include", *cuda_includes()]
    return [
        *_flags(version, abi),
        *(argument for path in includes for argument in ("-isystem", str(path))),
        *("-I", str(INCLUDE)),
        str(SOURCES / "shim.cpp"),
    ]


def link_arguments(root: Path) -> list[str]:
    """Returns the linker's arguments for the libraries of a PyTorch."""
    # CUDA's runtime is found through PyTorch's libraries, lowtide's functions in the loaded liblowtide.so.
    return ["-shared", "-L", str(root / "lib"), "-lc10", "-lc10_cuda", "-ltorch_cuda"]


def _flags(version: str, abi: bool) -> list[str]:
    major, minor = (int(number) for number in version.split(".")[:2])
    return [
        # The C++ version of PyTorch's headers.
        "-std=c++20" if (major, minor) >= (2, 14) else "-std=c++17",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(abi)}",
        # With hidden symbols, the shim's functions call each other directly.
        *("-O2", "-fPIC", "-fvisibility=hidden"),
    ]


def _conda_roots() -> list[Path]:
    # conda-forge installs CUDA into the environment, with platform-specific headers in `targets`. Only conda
    # environments count: with -isystem /usr/include, a compiler no longer finds its own headers.
    prefix = Path(sys.prefix)
    if not (prefix / "conda-meta").is_dir():
        return []
    return [*sorted(prefix.glob("targets/*-linux"), reverse=True), prefix]


def _package_roots(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    return [] if spec is None else [Path(path) for path in spec.submodule_search_locations or ()]


def _plan() -> tuple[list[str], Path]:
    """Returns the compiler's arguments for this process's PyTorch, and the path of the shim."""
    import torch

    root, abi = Path(torch.__file__).parent, torch.compiled_with_cxx11_abi()
    arguments = [*compile_arguments(root, torch.__version__, abi), *link_arguments(root)]
    known = _fingerprint(torch.version.git_version, torch.version.cuda, os.uname().machine, *arguments)
    return arguments, cache_directory() / f"torch-{torch.__version__}-{known}" / "shim.so"


def _fingerprint(*texts: str) -> str:
    """Returns a hash of these texts and of the shim's sources."""
    digest = hashlib.sha256()
    for text in texts:
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


def _built() -> Path:
    """Returns the path of the built shim for this process's PyTorch. Builds it if no process of this user has."""
    arguments, shim = _plan()
    try:
        # No other user can change this directory, so the checked file is the loaded file.
        shim = private_directory(shim.parent) / shim.name
        if not is_whole(shim):
            _build_once(arguments, shim)
    except OSError as error:
        raise _unkept(error) from None
    return shim


def _build_once(arguments: list[str], shim: Path) -> None:
    """Builds the shim, unless another process has built it meanwhile."""
    with locked(shim.parent / "lock"):
        if is_whole(shim):
            return
        version = shim.parent.name.rpartition("-")[0]
        report_line(f"building the shim for {version}, once: this takes about half a minute")
        start = time.monotonic()
        _compile(arguments, shim)
        report_line(f"the shim is built, in {time.monotonic() - start:.0f} s")


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
    # Write the checksum last: a process without the lock sees a matching pair, or builds.
    write(shim, content)
    write(_checksum_file(shim), _checksum(content))
