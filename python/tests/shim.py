"""Lines of programs that use the shim in a PyTorch that sees no GPU."""

from textwrap import dedent

SHIM = """
    import os, torch
    from lowtide._library import Mempool, check, library
    from lowtide.torch.install import install_shim
    install_shim(lambda: None)
    library().lowtide_retain_pool.argtypes = [__import__("ctypes").c_int, Mempool]
    check(library().lowtide_retain_pool(0, Mempool(0, 1)))
"""


# As `lowtide.install` leaves it, for what asks whether it was called.
INSTALLED = """
    import lowtide, lowtide._install
    lowtide._install._is_installed, lowtide._install._shim = True, install_shim(lambda: None)
"""


def compiled(name: str, source: str) -> str:
    """Returns lines that compile C++ as the shim is compiled and load it as `name`, and `allocate`."""
    return f"""
        import ctypes, subprocess, sys
        from pathlib import Path
        from lowtide.torch import build
        source = Path("{name}.cpp")
        source.write_text({dedent(source)!r})
        arguments, _ = build._plan()
        arguments = [source if argument.endswith("shim.cpp") else argument for argument in arguments]
        subprocess.run(
            [*build.compiler(), *arguments, "-fvisibility=default", "-o", "{name}.so"], check=True
        )
        {name} = ctypes.CDLL("./{name}.so")

        def allocate(size):
            memory = ctypes.c_void_p()
            check(library().lowtide_allocate(
                ctypes.c_size_t(size), 0, ctypes.c_void_p(), ctypes.byref(memory)))
            return memory
    """
