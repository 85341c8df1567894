"""Which context is current in a thread that asks for memory: programs call the driver themselves after that."""

import ctypes
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gpu_helpers import IS_NATIVE, MIB, bytes_of  # noqa: E402

NO_CONTEXT = 201

ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def current_context() -> int | None:
    context = ctypes.c_void_p()
    assert driver().cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value


def status_of_driver() -> int:
    """Returns what the driver says when this thread asks it for memory."""
    address = ctypes.c_uint64()
    status: int = driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1000))
    if status == 0:
        assert driver().cuMemFree_v2(address) == 0
    return status


def status_after(act: Callable[[], Any]) -> int:
    """Returns what the driver says in a new thread that has done something."""
    found = []

    def run() -> None:
        act()
        found.append(status_of_driver())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(found) == 1, "the thread failed"
    return int(found[0])


def foreign_allocator(statuses: list[int]) -> tuple[Any, tuple[Any, Any]]:
    """Returns an allocator of another package, which asks the driver, and the functions that it lives by."""

    def allocate(size: int, _device: int, _stream: int) -> int | None:
        address = ctypes.c_uint64()
        statuses.append(driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
        return address.value or None

    def release(address: int, _size: int, _device: int, _stream: int) -> None:
        statuses.append(driver().cuMemFree_v2(ctypes.c_uint64(address)))

    functions = ALLOCATE(allocate), RELEASE(release)
    addresses = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    return torch._C._cuda_customAllocator(*addresses), functions


def test_new_memory_leaves_the_primary_context_current() -> None:
    held = []
    # PyTorch makes a context current where it first looks for streams, once a process.
    torch.cuda.current_stream()
    assert status_after(lambda: None) == NO_CONTEXT
    assert status_after(lambda: held.append(bytes_of(64 * MIB))) == 0
    # Neither PyTorch nor lowtide calls the driver for these.
    assert status_after(held.clear) == NO_CONTEXT
    assert status_after(lambda: held.append(bytes_of(64 * MIB))) == NO_CONTEXT


def test_the_first_memory_of_a_process_leaves_the_primary_context_current() -> None:
    program = (
        "import sys, torch; sys.path[:0] = sys.argv[1:]\n"
        "from test_contexts import NO_CONTEXT, status_of_driver\n"
        "torch.cuda.init(); assert status_of_driver() == NO_CONTEXT\n"
        "held = torch.empty(1, device='cuda'); assert status_of_driver() == 0\n"
    )
    install = "" if IS_NATIVE else "import lowtide; lowtide.install()\n"
    here = Path(__file__).parent
    subprocess.run([sys.executable, "-c", install + program, here, here.parent], check=True, timeout=120)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_a_context_that_is_current_stays() -> None:
    found = []

    def run() -> None:
        torch.zeros(1, device="cuda:1")
        for device in range(2):
            with torch.cuda.device(device):
                before = current_context()
                held = torch.cuda.caching_allocator_alloc(64 * MIB, device=1 - device)
                found.append((before, current_context()))
                torch.cuda.caching_allocator_delete(held)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [before for before, _ in found] == [after for _, after in found]
    assert len({before for before, _ in found}) == 2


def test_an_allocator_of_another_package_may_call_the_driver() -> None:
    statuses: list[int] = []
    allocator, functions = foreign_allocator(statuses)
    pools = []

    def run() -> None:
        pools.append(torch.cuda.MemPool(allocator))
        with torch.cuda.use_mem_pool(pools[0]):
            held = bytes_of(30 * MIB)
        # Where the pool's memory goes back there is a context, as in programs that use the card.
        del held
        pools.clear()
        gc.collect()

    assert status_after(run) == 0
    assert statuses == [0, 0]
    # PyTorch keeps their addresses for as long as the process lives.
    _functions.append(functions)


_functions: list[Any] = []
