"""lowtide with the interface of torch_memory_saver 0.0.10.

    from lowtide.compat.torch_memory_saver import torch_memory_saver

Importing it makes lowtide PyTorch's allocator, if CUDA is not in use yet; if that fails, the first use says why. Both
hook modes work the same way: memory that PyTorch requests in a region comes from a region of lowtide.

Differences from the original package:

- Memory that other libraries allocate with `cudaMalloc` is in a region only under `lowtide run --preload`.
  `hook_mode` "preload" needs no LD_PRELOAD, and `cuda_graph` works with "torch", too.
- Errors are exceptions and never end the process. Pausing or resuming twice does nothing.
- Graphs that name one pool share its memory only within one region: each region has its own pool for it, which
  `graph.pool()` returns.
- A `torch.cuda.MemPool`, or the pool of a plain `torch.cuda.graph`, takes precedence over a region, even if the region
  begins inside of it. The pool of `disable` does not. The memory of such a pool stays on the GPU. With
  `TMS_INIT_ENABLE`, it is in the process's region if the pool began outside of `region` and `disable`.
  Use `cuda_graph` for graphs whose memory must be paused.
- A request in a paused region is an error. A backup copies only allocated blocks.
- A thread that PyTorch started, as for a backward pass, is in no region, except with `TMS_INIT_ENABLE`.
- `TMS_INIT_ENABLE` is in force from the process's first request on if `LOWTIDE_COMPAT` names torch_memory_saver, else
  from the import of this package on. Memory that was allocated before is in no region.
- lowtide always copies through page-locked memory into ordinary memory, which a background thread then page-locks.
  `cpu_backup_backend` says when a resume releases that memory: at once ("mmap"), or after half a minute, which makes
  the next backup faster ("pinned"). With "pinned", `get_cpu_backup(zero_copy=True)` waits until it is page-locked.
- A retained copy can be read after a resume until the region's next pause. A block that was allocated since has none.
- `TMS_DISK_BACKUP_CHUNK_MB` has no effect.
- Regions use no pools of PyTorch. For programs that delete a pool to free its region, `_impl._mem_pools` has an object
  for each region, with the original's keys. When it is deleted, the region's memory without blocks is released, and the
  backup if no block is left. It does not wait for blocks that are freed later.
- A directory for backups on disk has one file for each block, with the original's names of one file for each region.
- `expandable_segments:True` is allowed.
"""

from ..._errors import Error
from ..._install import install
from ..._library import library
from .._variables import read_variables
from .entrypoint import TorchMemorySaver
from .hooks.mode_preload import configure_subprocess

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]

torch_memory_saver = TorchMemorySaver()

# Reject invalid variables even if lowtide cannot be installed.
_variables = read_variables()
try:
    install()
except Error:
    # A program that imports this without using it may run anywhere. The first use tries again, and raises the error.
    pass
else:
    if _variables.is_process_in_region:
        # The first call of any function puts the process in its region.
        library().tms_get_interesting_region()
