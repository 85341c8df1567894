"""lowtide as CuPy's allocator, sharing its memory with PyTorch:

import lowtide.cupy
lowtide.cupy.install()
"""

import ctypes
from typing import Any

import cupy

from ._library import Status, check, library
from ._memory import memory_stats


def install() -> None:
    """Takes CuPy's memory from lowtide from now on, and without CuPy's own pool, which would keep it from PyTorch."""
    cupy.cuda.set_allocator(allocator().malloc)


def allocator() -> Any:
    """Returns an allocator of `cupy.cuda.memory` that takes memory from lowtide.

    As with CuPy's own, memory that was asked for in one stream may be reused in that stream as soon as it is freed.

    Its functions are Python's and not C's: CuPy tells a `CFunctionAllocator` neither the stream, without which another
    stream's memory would be handed out, nor takes its word for having run out of memory.
    """
    return cupy.cuda.memory.PythonFunctionAllocator(_allocate, _free)


def _allocate(size: int, device: int) -> int:
    memory = ctypes.c_void_p()
    stream = cupy.cuda.get_current_stream().ptr
    status = library().lowtide_allocate(size, device, stream, ctypes.byref(memory))
    if status == Status.OUT_OF_MEMORY:
        held = memory_stats(device)["allocated_bytes.all.current"]
        raise cupy.cuda.memory.OutOfMemoryError(size, held)
    check(status)
    return memory.value or 0


def _free(memory: int, _device: int) -> None:
    check(library().lowtide_deallocate(memory))
