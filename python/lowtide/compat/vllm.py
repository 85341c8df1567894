"""lowtide with the interface of `vllm.device_allocator.cumem`: the memory of vLLM's sleep mode.

Importing it makes lowtide PyTorch's allocator, if CUDA is not in use yet; where that is not possible, the first use
says why. What is different from the module whose interface this is: sleeping twice does nothing; a tag that fails to
sleep or to wake up keeps its contents and no other from it, so that another attempt does the rest; and expandable
segments need not be turned off. `get_current_usage` counts what tensors hold, and not what is mapped for them. What it
is made of (handles that Python maps and unmaps, noted in `pointer_to_data` and `allocator_and_pools`) is not there:
importing that is an `ImportError` that says what to do.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import _regions
from .._errors import Error
from .._install import install

cumem_available = True
"""Whether there is such an allocator. vLLM asks before it uses it."""


class CuMemAllocator:
    """Memory with tags, which sleeps and wakes up. There is one: `get_instance`."""

    instance: "CuMemAllocator | None" = None
    default_tag: str = "default"

    @staticmethod
    def get_instance() -> "CuMemAllocator":
        """Returns the one that there is."""
        if CuMemAllocator.instance is None:
            CuMemAllocator.instance = CuMemAllocator()
        return CuMemAllocator.instance

    def __init__(self) -> None:
        install()
        self._tags: set[str] = set()

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """While in it, memory that this thread asks for has a tag, and sleeps when the allocator does."""
        tag = CuMemAllocator.default_tag if tag is None else tag
        with _regions.region(tag, _BACKUP):
            self._tags.add(tag)
            yield

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Takes all memory off the devices. The contents of these tags are kept in the host's memory.

        `None` is the default tag.
        """
        if offload_tags is None:
            offload_tags = (CuMemAllocator.default_tag,)
        kept = (offload_tags,) if isinstance(offload_tags, str) else offload_tags
        import torch

        try:
            _for_each(self._tags, lambda tag: _regions.pause(tag, keep=tag in kept))
        finally:
            gc.collect()
            torch.cuda.empty_cache()

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Takes the memory of these tags off the devices and keeps none of its contents.

        What is asleep already stays as it is, with what was kept of it.
        """
        named = {tags} if isinstance(tags, str) else set(tags)
        _for_each(self._tags & named, lambda tag: _regions.pause(tag, keep=False))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Brings memory of these tags back, or all, at the addresses that it had."""
        _for_each({tag for tag in self._tags if tags is None or tag in tags}, _regions.resume)

    def get_current_usage(self) -> int:
        """Returns how many bytes tensors hold of this memory, asleep or not, on all devices."""
        return sum(seen["live_bytes"] for seen in _regions.regions() if seen["tag"] in self._tags)


def _for_each(tags: set[str], act: Callable[[str], None]) -> None:
    """Does something with each tag, of which one that fails keeps no other from it; raises the first error."""
    errors = []
    for tag in sorted(tags):
        try:
            act(tag)
        except Error as error:
            errors.append(error)
    if errors:
        raise errors[0]


_BACKUP: _regions.Backup = "host"

_PARTS = (
    *("create_and_map", "unmap_and_release", "python_create_and_map", "python_unmap_and_release", "init_module"),
    *("libcudart", "lib_name", "AllocationData", "HandleType"),
    *("get_pluggable_allocator", "use_memory_pool_with_allocator"),
)


def __getattr__(name: str) -> Any:
    """Raises an error for what the other module is made of.

    Who imports it replaces `sleep` and `wake_up` by loops over `pointer_to_data`. On lowtide's memory these would do
    nothing, and never call what they imported, so that it is too late to say so there.
    """
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(
        f"lowtide has no {name} of vllm.device_allocator.cumem, with which others replace its sleep and wake_up: "
        "leave that patch out and name tags (discard, wake_up), or take vllm out of LOWTIDE_COMPAT"
    )
