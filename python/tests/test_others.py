"""CuPy and Numba on lowtide, as far as can be told without them: `fakes` has their interfaces."""

import re

from machine import Machine

HELD = """
    import lowtide

    def held():
        return lowtide.memory_stats()["allocated_bytes.all.current"]
"""


def test_cupy(machine: Machine) -> None:
    printed = machine.code(
        HELD,
        """
        import cupy, lowtide.cupy
        lowtide.cupy.install()
        memory = cupy.cuda.alloc(1000)
        print(held(), cupy.cuda.alloc(0).ptr)
        del memory
        print(held())
        memory = cupy.cuda.alloc(1000)
        cupy.cuda.stream.ptr = 0x10
        # A stream gets no memory of another, free or not.
        other = cupy.cuda.alloc(1000)
        print(len({segment["stream"] for segment in lowtide.snapshot()["segments"]}))
        try:
            cupy.cuda.alloc(1 << 40)
        except cupy.cuda.memory.OutOfMemoryError as error:
            print(error)
        """,
    )
    assert printed == f"1024 0\n0\n2\n{1 << 40} more than 2048, limit 0\n"


def test_numba(machine: Machine) -> None:
    printed = machine.code(
        HELD,
        """
        import lowtide.numba
        from numba import cuda
        lowtide.numba.install()
        context = cuda.Context()
        manager = context.memory_manager
        print(manager.interface_version, manager.get_memory_info())
        pointer = manager.memalloc(1000)
        print(held(), pointer.size, pointer.device_pointer.value > 0)
        del pointer
        print(held(), context.waits)
        manager.reset()
        print(held(), context.waits)
        with manager.defer_cleanup():
            manager.memalloc(5 << 30)
        # What waits to be freed is freed before there is no memory.
        print(held() >> 30)
        pointer = manager.memalloc(6 << 30)
        print(held() >> 30, context.waits)
        try:
            manager.memalloc(1 << 40)
        except MemoryError as error:
            print(str(error).splitlines()[0])
        """,
    )
    lines = printed.splitlines()
    assert lines[0] == f"1 MemoryInfo(free={8 << 30}, total={8 << 30})"
    assert lines[1:6] == ["1024 1000 True", "1024 0", "0 1", "5", "6 2"]
    assert re.match("CUDA out of memory. Tried to allocate 1024.00 GiB", lines[6])


def test_numba_finds_it_by_its_variable(machine: Machine) -> None:
    printed = machine.code("import lowtide.numba as module; print(module._numba_memory_manager.__name__)")
    assert printed == "MemoryManager\n"
