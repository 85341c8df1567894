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
    """Makes lowtide Numba's allocator for device memory."""
    cuda.set_memory_manager(MemoryManager)


class MemoryManager(cuda.GetIpcHandleMixin, cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
    """A plugin for Numba's external memory interface. Numba allocates host memory itself.

    Numba does not say which streams use a block, so a free waits for the device, like `cuMemFree`. Numba collects its
    frees, and does several at a time.
    """

    @property
    def interface_version(self) -> int:
        """The version of Numba's interface."""
        return 1

    def initialize(self) -> None:
        """Sets the memory of the device, of which Numba's limit for collected frees is a fraction."""
        self.deallocations.memory_capacity = self.get_memory_info().total

    def memalloc(self, size: int) -> Any:
        """Returns `size` bytes of device memory. Raises `MemoryError` if the device has too little."""
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
        """Returns the free and the total memory of the device."""
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        check(library().lowtide_memory_info(self.context.device.id, ctypes.byref(free), ctypes.byref(total)))
        return cuda.MemoryInfo(free=free.value, total=total.value)

    def _finalizer(self, memory: int | None, size: int) -> Callable[[], None]:
        # Do not refer to the manager: the pointer would keep it alive.
        context, deallocations = weakref.ref(self.context), self.deallocations

        def free(memory: int | None) -> None:
            used_in = context()
            if used_in is not None:
                used_in.synchronize()
            check(library().lowtide_deallocate(memory))

        return lambda: deallocations.add_item(free, memory, size)


# Numba reads this name from the module in NUMBA_CUDA_MEMORY_MANAGER.
_numba_memory_manager = MemoryManager
