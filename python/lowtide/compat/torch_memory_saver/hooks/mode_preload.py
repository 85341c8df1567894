"""Memory comes from a library that the process was started with."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ...._run import script_environment
from ..._aliases import TORCH_MEMORY_SAVER, VARIABLE, is_installed_as_torch_memory_saver, names_of_environment
from ..binary_wrapper import cuda_runtime_file
from ..utils import change_env, get_binary_path_from_package
from .base import HookUtilBase


class HookUtilModePreload(HookUtilBase):
    """The mode "preload", for which the library need not have been preloaded."""


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """While in it, processes that are started install lowtide when they import PyTorch.

    Where `torch_memory_saver` is lowtide's here, it is there, too. What else is preloaded stays. CUDA's runtime is
    preloaded as well, if PyTorch has one of its own: the other's library brings it, and programs look for `cudaMalloc`
    among what is loaded.
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
