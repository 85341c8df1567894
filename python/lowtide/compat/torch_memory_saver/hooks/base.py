"""The hook modes."""

from typing import Literal

from ..utils import get_binary_path_from_package

HookMode = Literal["preload", "torch"]


class HookUtilBase:
    """A hook mode."""

    @staticmethod
    def create(hook_mode: HookMode) -> "HookUtilBase":
        """Returns a mode by its name."""
        from .mode_preload import HookUtilModePreload
        from .mode_torch import HookUtilModeTorch

        modes: dict[str, type[HookUtilBase]] = {"preload": HookUtilModePreload, "torch": HookUtilModeTorch}
        if hook_mode not in modes:
            raise ValueError(f"hook_mode is {' or '.join(modes)}, not {hook_mode!r}")
        return modes[hook_mode]()

    def get_path_binary(self) -> str:
        """Returns the path of the library with the mode's functions."""
        return str(get_binary_path_from_package("torch_memory_saver"))

    def get_allocator(self) -> None:
        """Returns `None`: memory pools allocate from lowtide by themselves."""
