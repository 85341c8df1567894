"""`torch.cuda`."""

import os

from . import memory as memory


def is_initialized() -> bool:
    return bool(os.environ.get("FAKE_TORCH_STARTED"))


def is_available() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 1
