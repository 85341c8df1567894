"""lowtide as CuPy's allocator, sharing its memory with PyTorch:

    import lowtide.cupy
    lowtide.cupy.install()
"""

import ctypes
from typing import Any

import cupy

from ._library import Status, check, library


def install() -> None:
    """Takes CuPy's memory from lowtide from now on, and directly: CuPy's own pool would keep it from PyTorch."""
    cupy.cuda.set_allocator(allocator().malloc)


def allocator() -> Any:
    """Returns an allocator of `cupy.cuda.memory` that takes memory from lowtide.

    It is one of Python functions and not a `CFunctionAllocator`: CuPy does not tell that one the stream, without which
    memory that another stream still uses could be handed out.
    """
    return cupy.cuda.memory.PythonFunctionAllocator(_allocate, _free)


def _allocate(size: int, device: int) -> int:
    memory = ctypes.c_void_p()
    stream = cupy.cuda.get_current_stream(device).ptr
    status = library().lowtide_allocate(size, device, stream, ctypes.byref(memory))
    if status == Status.OUT_OF_MEMORY:
        raise cupy.cuda.memory.OutOfMemoryError(size, _total(device), _limit(device))
    check(status)
    return memory.value or 0


def _free(memory: int, _device: int) -> None:
    check(library().lowtide_deallocate(memory))
