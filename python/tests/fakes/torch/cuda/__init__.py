"""`torch.cuda`."""

import os
import warnings

from . import memory as memory


def is_initialized() -> bool:
    return bool(os.environ.get("FAKE_TORCH_STARTED"))


def device_count() -> int:
    return int(os.environ.get("FAKE_TORCH_CARDS", "1"))


def is_available() -> bool:
    if device_count() == 0:
        warnings.warn("the driver is older than PyTorch\nand so on", stacklevel=2)
    return device_count() > 0


def current_device() -> int:
    return 1
