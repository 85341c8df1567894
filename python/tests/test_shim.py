"""The shim in a PyTorch that sees no GPU: what of it needs no CUDA, on the stand-in driver.

They need the real PyTorch, and are skipped without. What needs a GPU is in `gpu`.
"""

import pytest
from machine import Machine

pytest.importorskip("torch")

SHIM = """
    import os, torch
    from lowtide._library import Mempool, check, library
    from lowtide.torch.install import install_shim
    install_shim()
    library().lowtide_retain_pool.argtypes = [__import__("ctypes").c_int, Mempool]
    check(library().lowtide_retain_pool(0, Mempool(0, 1)))
"""


def test_a_forked_child_lets_go_of_the_pools_that_it_inherits(gpu: Machine) -> None:
    # The destructor of a graph does this, in which an exception ends the process.
    printed = gpu.code(
        SHIM,
        """
        child = os.fork()
        if child == 0:
            try:
                torch._C._cuda_releasePool(0, (0, 1))
            except RuntimeError as error:
                print(error, flush=True)
                os._exit(1)
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        torch._C._cuda_releasePool(0, (0, 1))
        try:
            torch._C._cuda_releasePool(0, (0, 1))
        except RuntimeError:
            print("the parent is told")
        """,
    )
    assert printed == "0\nthe parent is told\n"
