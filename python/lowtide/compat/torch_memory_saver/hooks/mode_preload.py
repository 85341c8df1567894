"""The hook mode with a preloaded library."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ...._run import script_environment
from ..._aliases import TORCH_MEMORY_SAVER, VARIABLE, is_installed_as_torch_memory_saver, names_of_environment
from ..binary_wrapper import cuda_runtime_file
from ..utils import change_env, get_binary_path_from_package
from .base import HookUtilBase


class HookUtilModePreload(HookUtilBase):
    """The mode "preload". It works without a preloaded library."""


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """A context in which new processes install lowtide when they import PyTorch.

    If `torch_memory_saver` is lowtide's in this process, it is in those, too. Other preloaded libraries stay. CUDA's
    runtime is preloaded, too, if PyTorch has it as a file. The original library brings it, and programs look up
    `cudaMalloc` in the loaded libraries.
    """
    changed = script_environment(os.environ, None, None)
    library = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    preloaded = [library, cuda_runtime_file(), os.environ.get("LD_PRELOAD")]
    changed["LD_PRELOAD"] = ":".join(filter(None, preloaded))
    if is_installed_as_torch_memory_saver():
        changed[VARIABLE] = ",".join(dict.fromkeys((*names_of_environment(), TORCH_MEMORY_SAVER)))
    with ExitStack() as stack:
        for name, value in changed.items():
            if os.environ.get(name) != value:
                stack.enter_context(change_env(name, value))
        yield
