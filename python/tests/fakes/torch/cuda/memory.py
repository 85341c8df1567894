"""`torch.cuda.memory`, with the pluggable allocator's hooks as C would call them."""

import ctypes
import os


class Hooks:
    """What `CUDAPluggableAllocator.allocator()` returns: remembers the address of each hook."""

    def __init__(self) -> None:
        self.addresses: dict[str, int] = {}

    def __getattr__(self, setter: str) -> object:
        if not setter.startswith("set_"):
            raise AttributeError(setter)

        def remember(address: int) -> None:
            self.addresses[setter] = address

        return remember


class CUDAPluggableAllocator:
    """An allocator of two C functions."""

    def __init__(self, path: str, allocate: str, free: str) -> None:
        library = ctypes.CDLL(path)
        self.allocate = getattr(library, allocate)
        self.free = getattr(library, free)
        self.hooks = Hooks()

    def allocator(self) -> Hooks:
        return self.hooks


current: CUDAPluggableAllocator | None = None


def change_current_allocator(allocator: CUDAPluggableAllocator) -> None:
    global current
    if current is not None or os.environ.get("FAKE_TORCH_IN_USE"):
        raise RuntimeError("Can't swap an already initialized allocator")
    current = allocator
