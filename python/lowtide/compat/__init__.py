"""lowtide by the names of other packages, so that what imports those runs on it without a change.

import lowtide.compat
lowtide.compat.install_as_torch_memory_saver()  # `import torch_memory_saver` is lowtide's from now on
lowtide.compat.install_as_vllm_cumem()  # and so is `vllm.device_allocator.cumem`

Or without touching the program: `LOWTIDE_COMPAT=torch_memory_saver,vllm python -m lowtide run serve.py`, which its
children inherit.
"""

from ._aliases import install_as_torch_memory_saver, install_as_vllm_cumem

__all__ = ["install_as_torch_memory_saver", "install_as_vllm_cumem"]
