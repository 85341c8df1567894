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
    """Makes lowtide CuPy's allocator, without CuPy's memory pool, which would keep memory from PyTorch."""
    cupy.cuda.set_allocator(allocator().malloc)


def allocator() -> Any:
    """Returns an allocator for `cupy.cuda.memory` that allocates from lowtide.

    Like CuPy's own, it may reuse a block in the block's stream as soon as it is freed.

    It is in Python, because CuPy does not pass the stream to a `CFunctionAllocator`: it could return another stream's
    block. It also could not raise an out-of-memory error.
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
