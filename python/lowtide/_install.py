"""Makes lowtide PyTorch's allocator.

The package does not start the driver before the program does, so that a process can still fork. `run` and `install`
open the driver's library to check that it exists, and call nothing in it.
"""

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._errors import ConfigError, Error, NoDriverError, StartedError, TorchError, first_line, report_line
from ._library import PATH, Mempool, Status, address, check, error_of, library

TORCH_MIN = (2, 6)
"""The oldest PyTorch that has the pluggable interface used here."""

SHIM_MIN, SHIM_MAX = (2, 8), (2, 15)
"""The oldest and the newest PyTorch that the shim can be built for."""

_PYTORCH_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_REGISTRATION = ("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK")
"""Variables that make PyTorch register all memory with NCCL. PyTorch reads them for its first process group."""

_TRUE = {"1", "t", "true", "y", "yes"}

RUN_PREFIX = "LOWTIDE_RUN_PREFIX"
"""The variable with the Python environment (`sys.prefix`) that `run` was started in."""

REPORTED = "LOWTIDEREPORTED"
"""The variable that a process sets once it has reported that lowtide is active."""

_OTHER_BACKEND = re.compile(r"(^|,)\s*backend\s*:\s*cudaMallocAsync\s*(,|$)")

# Setters of PyTorch's pluggable allocator, each with the C function that it gets. `_PYTHON_HOOKS` has those in Python.
_HOOKS = {
    "set_init_fn": "lowtide_init",
    "set_reset_fn": "lowtide_reset",
    "set_memory_fraction_fn": "lowtide_hook_set_memory_fraction",
    "set_base_alloc_fn": "lowtide_base_alloc",
    "set_record_stream_fn": "lowtide_hook_record_stream",
    "set_release_pool": "lowtide_release_pool",
}

_is_installed = False
_shim: ctypes.CDLL | None = None


def install(strategy: str | None = None, config: str | None = None) -> None:
    """Makes lowtide PyTorch's allocator for every device of this process, before CUDA is in use.

    `strategy` is a name, or a name and its options as `lowtide replay` prints them:
    `"caching:expandable_segments:True"`. `config` has the options alone, in the syntax of
    `PYTORCH_CUDA_ALLOC_CONF`. `LOWTIDE_STRATEGY` and `LOWTIDE_CONF` replace an argument that is `None`. Without
    options, `caching` reads PyTorch's `PYTORCH_CUDA_ALLOC_CONF`. Options without a strategy are for `caching`. Without
    either, the strategy is `tide`, which has no options. If a variable of PyTorch's is set then, a line on standard
    error says that it is not read.

    A later call changes the choice, as long as CUDA is not in use; without arguments it does nothing. If lowtide has
    served requests already, as in a program of `lowtide run --preload`, a call without arguments keeps the choice.

    If the shim for this PyTorch is not prebuilt, the first call builds it, which takes half a minute. If that fails, a
    line on standard error says why, and PyTorch's pluggable interface is used. Memory works then, but the memory
    statistics of `torch.cuda` do not: use `memory_stats` and `snapshot` of this module.

    Raises `ConfigError`, `TorchError`, `NoDriverError` or `StartedError`; PyTorch's allocator has then not changed.
    """
    global _is_installed
    # In a program of `run`, the import installs lowtide, with the environment's choice.
    torch = import_torch()
    if _is_installed and strategy is None and config is None:
        return
    has_started = False
    try:
        configure(strategy, config)
    except StartedError:
        if strategy is not None or config is not None:
            raise
        has_started = True
    if _is_installed:
        adapt_registration()
        return
    if torch.cuda.is_initialized():
        raise _started()
    # Check the driver first: a program that runs without a driver runs with any PyTorch.
    find_driver()
    check_torch(torch)
    if not has_started:
        if RUN_PREFIX not in os.environ:
            report_unread_settings(strategy, config)
        check(library().lowtide_set_torch_version(*torch_version(torch)))
    reason = _install_shim(torch)
    if reason is not None:
        _install_pluggable(torch)
        report_line(f"without the shim torch.cuda knows nothing about memory: {reason}")
    adapt_registration()
    _is_installed = True


def is_installed() -> bool:
    """Returns whether lowtide is PyTorch's allocator in this process.

    It is `False`, too, once a program has installed another one (`torch.cuda.memory.change_current_allocator`). PyTorch
    allows that until CUDA is in use.
    """
    return _is_installed and (_shim is None or bool(_shim.lowtide_torch_is_installed()))


def check_served() -> None:
    """Raises `Error` if lowtide is not PyTorch's allocator: a region would silently hold nothing."""
    if "torch" in sys.modules and not is_installed():
        raise Error(
            "lowtide is not PyTorch's allocator, so a region would hold nothing: call lowtide.install() before "
            "anything is on the GPU, or start the script by `lowtide run`, and install no other after it"
        )


def pause(tag: bytes | None, keep: bool) -> None:
    """Pauses regions, and detaches PyTorch's cuBLAS workspaces in their memory."""
    if _shim is None:
        check(library().lowtide_pause(tag) if keep else library().lowtide_pause_and_drop(tag))
    else:
        _check_change(_shim, _shim.lowtide_torch_pause(tag, keep))


def resume(tag: bytes | None) -> None:
    """Resumes regions, and reattaches the workspaces."""
    if _shim is None:
        check(library().lowtide_resume(tag))
    else:
        _check_change(_shim, _shim.lowtide_torch_resume(tag))


def _check_change(shim: ctypes.CDLL, status: int) -> None:
    if status != Status.OK:
        raise error_of(status, shim.lowtide_torch_change_error())


def configure(strategy: str | None, config: str | None) -> None:
    """Chooses strategy and options. Raises `ConfigError` or `StartedError`, and then changes nothing."""
    message = other_backend()
    if message is not None:
        raise ConfigError(f"{message}: take that out")
    choose(strategy, config)


def report_unread_settings(strategy: str | None, config: str | None) -> None:
    """Reports a variable of PyTorch's that is set and not read, if there is one."""
    variable = unread_variable(strategy, config)
    if variable is not None:
        report_line(f"tide has no options and does not read {variable}; LOWTIDE_STRATEGY=caching does")


def report_active() -> None:
    """Reports that lowtide is active, once in a process and its children."""
    if REPORTED not in os.environ:
        os.environ[REPORTED] = "1"
        report_line(f"active, with the strategy {library().lowtide_config().decode()}")


_removed: dict[str, str] = {}


def adapt_registration() -> None:
    """Turns NCCL's registration off if lowtide maps other memory at the same addresses, else on again.

    NCCL would keep using the memory that it registered. PyTorch does the same for its expandable segments.
    """
    config = library().lowtide_config().decode()
    if config != "tide" and "expandable_segments:True" not in config:
        os.environ.update(_removed)
        _removed.clear()
        return
    for name in _REGISTRATION:
        if os.environ.get(name, "").lower() in _TRUE:
            _removed[name] = os.environ.pop(name)
            report_line(f"{name} is off, because {config} maps other memory at the same addresses; caching does not")


def unread_variable(strategy: str | None, config: str | None) -> str | None:
    """Returns the variable with PyTorch's settings if nothing names a strategy or options: `tide` does not read it."""
    ours = (os.environ.get("LOWTIDE_STRATEGY"), os.environ.get("LOWTIDE_CONF"))
    return None if any((strategy, config, *ours)) else pytorch_variable()


def pytorch_variable() -> str | None:
    """Returns the variable with PyTorch's settings, if there are any."""
    # PyTorch reads the first one that is set, even to an empty text.
    variable = next((name for name in _PYTORCH_VARIABLES if name in os.environ), None)
    return variable if variable is not None and os.environ[variable] != "" else None


def other_backend() -> str | None:
    """Returns a text with the variable that asks PyTorch for cudaMallocAsync, or `None`."""
    variable = pytorch_variable()
    if variable is None or _OTHER_BACKEND.search(os.environ[variable]) is None:
        return None
    return f"{variable} asks for backend:cudaMallocAsync, an allocator of its own"


def choose(strategy: str | None, config: str | None) -> None:
    """Like `configure`, for a program whose PyTorch, if any, keeps its own allocator."""
    name, colon, options = (strategy or "").partition(":")
    if colon and config is not None:
        raise ConfigError(f"the options are given twice: in the strategy '{strategy}' and as '{config}'")
    check(library().lowtide_configure(_to_c(name or None), _to_c(options if colon else config)))


def find_driver() -> None:
    """Raises `NoDriverError` if there is no driver. Does not start it: the process may still fork."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoDriverError(f"NVIDIA's driver cannot be loaded: {error}") from None


def torch_version(torch: Any) -> tuple[int, int]:
    """Returns the first two numbers of a PyTorch's version."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def shim_obstacle(torch: Any) -> str | None:
    """Returns why there is no shim for this version of PyTorch, or `None` if there is one."""
    if SHIM_MIN <= torch_version(torch) <= SHIM_MAX:
        return None
    lowest, highest = (".".join(map(str, version)) for version in (SHIM_MIN, SHIM_MAX))
    return f"it is for PyTorch {lowest} to {highest}, and this is {torch.__version__}"


def check_torch(torch: Any) -> None:
    """Raises `TorchError` for a PyTorch that lowtide does not support."""
    if torch_version(torch) < TORCH_MIN:
        needed = ".".join(map(str, TORCH_MIN))
        raise TorchError(f"PyTorch {torch.__version__} is too old: lowtide needs {needed} or newer")
    if torch.version.cuda is None:
        raise TorchError(f"this PyTorch, {torch.__version__}, is built without CUDA: install one with it")


def import_torch() -> Any:
    """Returns PyTorch. Raises `TorchError` if it cannot be imported."""
    try:
        import torch
    except ImportError as error:
        raise TorchError(f"PyTorch cannot be imported ({error}): pip install torch") from None
    return torch


def _install_shim(torch: Any) -> str | None:
    """Installs the shim. Returns the reason if that fails, else `None`."""
    global _shim
    obstacle = shim_obstacle(torch)
    if obstacle is not None:
        return obstacle
    # Anything may fail here: compilers, headers, disks. Memory works without the shim.
    try:
        from .torch.install import install_shim

        _shim = install_shim(adapt_registration)
    except StartedError:
        raise
    except Exception as error:
        return first_line(error)
    return None


def _install_pluggable(torch: Any) -> None:
    memory = torch.cuda.memory
    allocator = memory.CUDAPluggableAllocator(str(PATH), "lowtide_malloc", "lowtide_free")
    hooks = allocator.allocator()
    for setter, function in _HOOKS.items():
        getattr(hooks, setter)(address(function))
    for setter, callback in _PYTHON_HOOKS.items():
        getattr(hooks, setter)(ctypes.cast(callback, ctypes.c_void_p).value)
    try:
        memory.change_current_allocator(allocator)
    except RuntimeError:
        # PyTorch has no other reason to refuse.
        raise _started() from None


def _begin_allocate_to_pool(device: int, pool: Mempool, _filter: int) -> None:
    """PyTorch's hook. Its filter is a C++ `std::function`, which cannot be called from here. So requests of all streams
    go to the pool, also those that need not be in it.

    The interface has no `torch.cuda.MemPool`, so only graph captures call this. It announces a capture in no other way.
    An event that is queried during a capture would invalidate it."""
    with _report_errors():
        check(library().lowtide_begin_allocate_to_pool(device, pool, None, None, None))
        check(library().lowtide_capture_begin(device))


def _end_allocate_to_pool(device: int, pool: Mempool) -> None:
    """PyTorch's hook."""
    with _report_errors():
        check(library().lowtide_capture_end(device))
        check(library().lowtide_end_allocate_to_pool(device, pool))


@contextmanager
def _report_errors() -> Iterator[None]:
    try:
        yield
    except Error as error:
        # An exception cannot pass through PyTorch's C++.
        report_line(str(error))


# The callbacks for C. They must live as long as the process.
_PYTHON_HOOKS = {
    "set_begin_allocate_to_pool": ctypes.CFUNCTYPE(None, ctypes.c_int, Mempool, ctypes.c_void_p)(
        _begin_allocate_to_pool
    ),
    "set_end_allocate_to_pool_fn": ctypes.CFUNCTYPE(None, ctypes.c_int, Mempool)(_end_allocate_to_pool),
}


def _started() -> StartedError:
    return StartedError(
        "CUDA is in use already: call lowtide.install() before anything is on the GPU, "
        "or start the script by `lowtide run`"
    )


def _to_c(text: str | None) -> bytes | None:
    if text is not None and "\0" in text:
        raise ConfigError(f"a zero byte in {text!r}")
    return None if text is None else text.encode()
