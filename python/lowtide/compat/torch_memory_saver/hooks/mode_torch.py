"""The hook mode with PyTorch's allocator."""

from .base import HookUtilBase


class HookUtilModeTorch(HookUtilBase):
    """The mode "torch"."""
