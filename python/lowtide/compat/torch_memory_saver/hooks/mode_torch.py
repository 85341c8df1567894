"""Memory comes from the allocator that PyTorch was given."""

from .base import HookUtilBase


class HookUtilModeTorch(HookUtilBase):
    """The mode "torch"."""
