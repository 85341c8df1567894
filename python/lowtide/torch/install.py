"""Installs the shim in this process."""

import ctypes
import functools
import warnings
from collections.abc import Callable
from typing import Any

from .._errors import StartedError
from .._library import Status, library
from .build import build

# PyTorch's functions for changing settings at run time, by whichever name a version has.
_SETTERS = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")


def install_shim(changed: Callable[[], None]) -> ctypes.CDLL:
    """Puts lowtide in the place of PyTorch's CUDA allocator, for the rest of the process, and returns the shim.

    `changed` is called whenever PyTorch's functions for that have changed the settings.
    Builds the shim if need be. Raises `BuildError` where it cannot be built, and `StartedError` where CUDA
    is in use already; nothing has changed then. A second call does nothing.
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
    """Returns a setter after which lowtide has the settings too. What PyTorch refuses, lowtide never sees."""

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
    # The settings are for PyTorch's strategy. A script that makes them runs all the same with another.
    warnings.warn(f"lowtide goes on without `{settings.decode(errors='replace')}`: {reason}", stacklevel=4)
