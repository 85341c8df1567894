"""lowtide as Numba's allocator, sharing its memory with PyTorch:

    import lowtide.numba
    lowtide.numba.install()

before Numba has used CUDA, or `NUMBA_CUDA_MEMORY_MANAGER=lowtide.numba` in the environment.
"""

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

from numba import cuda

from ._library import Status, check, library


def install() -> None:
    """Takes Numba's device memory from lowtide from now on."""
    cuda.set_memory_manager(MemoryManager)


class MemoryManager(cuda.GetIpcHandleMixin, cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
    """A plugin by Numba's interface for external memory. Memory for the host stays Numba's.

    Numba does not say which streams use what it frees, so that a free waits for the device, as `cuMemFree` does. It
    collects its frees, and does that for some at a time.
    """

    @property
    def interface_version(self) -> int:
        """The version of Numba's interface."""
        return 1

    def initialize(self) -> None:
        """Lets frees be collected, up to a part of the device's memory that Numba sets."""
        self.deallocations.memory_capacity = self.get_memory_info().total

    def memalloc(self, size: int) -> Any:
        """Returns `size` bytes of the device. Raises `MemoryError`."""
        memory = ctypes.c_void_p()

        def allocate() -> int:
            status: int = library().lowtide_allocate(size, self.context.device.id, None, ctypes.byref(memory))
            return status

        status = allocate()
        if status == Status.OUT_OF_MEMORY:
            self.deallocations.clear()
            status = allocate()
        if status == Status.OUT_OF_MEMORY:
            raise MemoryError(library().lowtide_last_error().decode())
        check(status)
        context = weakref.proxy(self.context)
        return cuda.MemoryPointer(context, memory, size, finalizer=self._finalizer(memory.value, size))

    def get_memory_info(self) -> Any:
        """Returns what the driver could still hand out, and all that the device has."""
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        check(library().lowtide_memory_info(self.context.device.id, ctypes.byref(free), ctypes.byref(total)))
        return cuda.MemoryInfo(free=free.value, total=total.value)

    def _finalizer(self, memory: int | None, size: int) -> Callable[[], None]:
        # Not the manager, which the pointer would keep alive.
        context, deallocations = weakref.ref(self.context), self.deallocations

        def release(memory: int | None) -> None:
            used_in = context()
            if used_in is not None:
                used_in.synchronize()
            check(library().lowtide_deallocate(memory))

        return lambda: deallocations.add_item(release, memory, size)


# What Numba looks for in a module that NUMBA_CUDA_MEMORY_MANAGER names.
_numba_memory_manager = MemoryManager
