"""PyTorch's entry point `torch.backends`, which it calls at the end of its import: `LOWTIDE=1 python train.py`."""

import os

from ._install import RUN_PREFIX


def load() -> None:
    """Installs lowtide if the environment has `LOWTIDE=1`. `lowtide run` installs it without this."""
    if os.environ.get("LOWTIDE", "") in ("", "0") or RUN_PREFIX in os.environ:
        return
    from ._hook import install_or_exit

    install_or_exit()
