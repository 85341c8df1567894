"""lowtide under the names of other packages, so that programs for those run on lowtide unchanged.

import lowtide.compat
lowtide.compat.install_as_torch_memory_saver()  # `import torch_memory_saver` is lowtide's from now on
lowtide.compat.install_as_vllm_cumem()  # and so is `vllm.device_allocator.cumem`

The environment does the same without a change to the program, for its children, too:
`LOWTIDE_COMPAT=torch_memory_saver,vllm lowtide run serve.py`.
"""

from ._aliases import install_as_torch_memory_saver, install_as_vllm_cumem

__all__ = ["install_as_torch_memory_saver", "install_as_vllm_cumem"]
