"""Installs the shim in this process."""

import ctypes
import functools
import warnings
from collections.abc import Callable
from typing import Any

from .._errors import StartedError
from .._library import Status, library
from .build import build

# PyTorch's functions that change settings at run time. The name depends on the version.
_SETTERS = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")


def install_shim(changed: Callable[[], None]) -> ctypes.CDLL:
    """Makes lowtide PyTorch's CUDA allocator for the rest of the process, and returns the shim.

    Calls `changed` whenever one of PyTorch's functions has changed the settings. Builds the shim if there is none
    yet. Raises `BuildError` if that fails, and `StartedError` if CUDA is in use already; then nothing has changed. A
    second call does nothing.
    """
    import torch

    shim = build()
    reason = shim.lowtide_torch_install()
    if reason is not None:
        raise StartedError(reason.decode())
    for name in _SETTERS:
        setter = getattr(torch._C, name, None)
        if setter is not None and not hasattr(setter, "__wrapped__"):
            setattr(torch._C, name, _and_reconfigure(setter, changed))
    return shim


def _and_reconfigure(setter: Callable[[str | bytes], Any], changed: Callable[[], None]) -> Callable[[str | bytes], Any]:
    """Returns a setter that also passes the settings to lowtide, if PyTorch accepts them."""

    @functools.wraps(setter)
    def change(settings: str | bytes) -> Any:
        result = setter(settings)
        _reconfigure(settings if isinstance(settings, bytes) else settings.encode())
        changed()
        return result

    return change


def _reconfigure(settings: bytes) -> None:
    if library().lowtide_reconfigure(settings) == Status.OK:
        return
    describe = library().lowtide_config
    describe.restype = ctypes.c_char_p
    reason = library().lowtide_last_error().decode()
    if (describe() or b"").startswith(b"caching"):
        raise ValueError(reason)
    # The settings are for PyTorch's strategy. With another strategy, the script still runs.
    warnings.warn(f"lowtide goes on without `{settings.decode(errors='replace')}`: {reason}", stacklevel=4)
