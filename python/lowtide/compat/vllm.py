"""lowtide with the interface of `vllm.device_allocator.cumem`: the memory of vLLM's sleep mode.

Importing it makes lowtide PyTorch's allocator, if CUDA is not in use yet; if that fails, the first use says why.

Differences from the original module:

- Sleeping twice does nothing.
- A tag that fails to sleep or wake up keeps its contents and does not stop other tags. Another attempt does the rest.
- Expandable segments may stay on.
- `get_current_usage` counts the bytes of tensors, not the mapped bytes.
- The original's internals are missing: handles that Python maps and unmaps, `pointer_to_data`, `allocator_and_pools`.
  Importing such a name raises an `ImportError` that says what to do.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import _regions
from .._errors import Error
from .._install import install

cumem_available = True
"""Whether the allocator is available. vLLM checks this before it uses it."""


class CuMemAllocator:
    """An allocator of tagged memory that sleeps and wakes up. `get_instance` returns the only one."""

    instance: "CuMemAllocator | None" = None
    default_tag: str = "default"

    @staticmethod
    def get_instance() -> "CuMemAllocator":
        """Returns the only instance."""
        if CuMemAllocator.instance is None:
            CuMemAllocator.instance = CuMemAllocator()
        return CuMemAllocator.instance

    def __init__(self) -> None:
        install()
        self._tags: set[str] = set()

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """A context in which this thread's memory has a tag, and sleeps when the allocator does."""
        tag = CuMemAllocator.default_tag if tag is None else tag
        with _regions.region(tag, _BACKUP):
            self._tags.add(tag)
            yield

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Takes all memory off the devices. Saves the contents of these tags in host memory.

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
        """Takes the memory of these tags off the devices without saving its contents.

        Memory that is asleep already stays asleep, with its saved contents.
        """
        named = {tags} if isinstance(tags, str) else set(tags)
        _for_each(self._tags & named, lambda tag: _regions.pause(tag, keep=False))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Brings the memory of these tags, or all, back at the addresses that it had."""
        _for_each({tag for tag in self._tags if tags is None or tag in tags}, _regions.resume)

    def get_current_usage(self) -> int:
        """Returns the bytes of tensors in this memory, asleep or not, on all devices."""
        return sum(seen["live_bytes"] for seen in _regions.regions() if seen["tag"] in self._tags)


def _for_each(tags: set[str], act: Callable[[str], None]) -> None:
    """Calls `act` with each tag, even after a failure. Then raises the first error."""
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
    """Raises an error for the original module's internals.

    A program that imports them replaces `sleep` and `wake_up` by loops over `pointer_to_data`. With lowtide, these
    loops would do nothing and never call the imported functions, so the import must fail.
    """
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(
        f"lowtide has no {name} of vllm.device_allocator.cumem, with which others replace its sleep and wake_up: "
        "leave that patch out and name tags (discard, wake_up), or take vllm out of LOWTIDE_COMPAT"
    )
