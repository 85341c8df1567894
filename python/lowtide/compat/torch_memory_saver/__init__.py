"""lowtide with the interface of torch_memory_saver 0.0.10.

    from lowtide.compat.torch_memory_saver import torch_memory_saver

Importing it makes lowtide PyTorch's allocator, if CUDA is not in use yet; where that is not possible, the first use
says why. Both hook modes are served, by the same means: memory that PyTorch asks for in a region comes from a region
of lowtide. What is different from the package whose interface this is:

- What other libraries take by `cudaMalloc` is in a region only in a program that `python -m lowtide run --preload`
  started. `hook_mode` "preload" needs no LD_PRELOAD, and `cuda_graph` works with "torch", too.
- Errors are exceptions, and nothing ends the process. Pausing or resuming twice does nothing.
- Graphs that name one pool share its memory where they are of one region: each region has a pool of its own there,
  which `graph.pool()` says.
- A `torch.cuda.MemPool` or the pool of a plain `torch.cuda.graph` goes before a region even where the region begins
  inside of it, but for the pool of `disable`: what is in it stays on the card. With `TMS_INIT_ENABLE` it is in the
  process's region where it was begun outside of `region` and `disable`.
  `cuda_graph` is for graphs whose memory is to leave.
- A request in a region that is paused is an error. Only blocks that are held are copied by a backup.
- A thread that PyTorch started, as for a backward pass, is in no region, but with `TMS_INIT_ENABLE`.
- `TMS_INIT_ENABLE` is in force from the process's first request on where `LOWTIDE_COMPAT` names torch_memory_saver,
  else from the import of this on: what was allocated before that is in no region.
- lowtide always copies through page-locked memory into ordinary memory, which is page-locked beside the program.
  `cpu_backup_backend` says whether that goes back at once with a resume ("mmap") or after half a minute, as the next
  backup is faster with it ("pinned"); with the latter, `get_cpu_backup(zero_copy=True)` waits until it is page-locked.
  A copy that is retained can be read after a resume, as there, until its region is paused again; a block that was
  handed out since then has none. `TMS_DISK_BACKUP_CHUNK_MB` changes nothing.
- Regions take no pools of PyTorch's. For programs that end one to be rid of a region, `_impl._mem_pools` has an object
  for each, by the other's keys: when nobody has it any more, what no block of the region uses goes back, its backup
  with the last block. It does not wait for blocks that are freed later.
- A directory for backups on disk shows a file for each block, by names of one file for each region.
- `expandable_segments:True` is no obstacle.
"""

from ..._errors import Error
from ..._install import install
from ..._library import library
from .._variables import read_variables
from .entrypoint import TorchMemorySaver
from .hooks.mode_preload import configure_subprocess

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]

torch_memory_saver = TorchMemorySaver()

# What is not clear in the environment is refused whether or not lowtide can be installed.
_variables = read_variables()
try:
    install()
except Error:
    # A program that imports this and does not use it may run anywhere. The first use tries again, and says why not.
    pass
else:
    if _variables.is_process_in_region:
        # Whatever is asked first puts the process there.
        library().tms_get_interesting_region()
