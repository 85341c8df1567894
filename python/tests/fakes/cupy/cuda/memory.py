"""`cupy.cuda.memory`."""

from collections.abc import Callable


class OutOfMemoryError(MemoryError):
    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        super().__init__(f"{size} more than {total}, limit {limit}")


class Memory:
    """Memory that is freed with the last reference to this."""

    def __init__(self, size: int, allocate: Callable[[int, int], int], free: Callable[[int, int], None]) -> None:
        self.free = free
        self.ptr = allocate(size, 0) if size > 0 else 0

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):
            self.free(self.ptr, 0)


class PythonFunctionAllocator:
    def __init__(self, allocate: Callable[[int, int], int], free: Callable[[int, int], None]) -> None:
        self.functions = allocate, free

    def malloc(self, size: int) -> Memory:
        return Memory(size, *self.functions)
