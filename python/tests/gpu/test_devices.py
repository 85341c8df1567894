"""Two devices in one process: where a request goes, and what each is said to hold."""

import ctypes
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from gpu_helpers import IS_NATIVE, MIB, expandable, on_a_card, run_ranks  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")


@on_a_card
def test_tensors_are_copied_between_devices() -> None:
    source = torch.arange(MIB, device="cuda:0")
    copy = source.to("cuda:1")
    assert torch.equal(copy.cpu(), source.cpu())
    assert torch.cuda.memory_allocated(1) >= 8 * MIB
    with expandable(), torch.cuda.stream(torch.cuda.Stream(0)):
        source = torch.arange(MIB, device="cuda:0") * 2
        torch.cuda.synchronize()
        assert torch.equal(source.to("cuda:1").cpu(), torch.arange(MIB) * 2)


def test_figures_are_kept_for_each_device() -> None:
    before = torch.cuda.memory_allocated(0)
    held = torch.empty(MIB, dtype=torch.uint8, device="cuda:1")
    assert torch.cuda.memory_allocated(0) == before
    assert torch.cuda.memory_allocated(1) >= MIB
    assert torch.cuda.memory_stats(1)["allocation.all.current"] >= 1
    del held


def device_of_request() -> int:
    """Returns the device that a request without a guard goes to, as a C++ extension makes it."""
    before = [torch.cuda.memory_allocated(device) for device in range(2)]
    memory = torch._C._cuda_cudaCachingAllocator_raw_alloc(MIB, 0)
    grown = [torch.cuda.memory_allocated(device) > held for device, held in enumerate(before)]
    torch._C._cuda_cudaCachingAllocator_raw_delete(memory)
    assert sum(grown) == 1
    return grown.index(True)


@contextmanager
def current_context(
    make: Callable[[ctypes.CDLL, ctypes.c_void_p], int], end: Callable[[ctypes.CDLL, ctypes.c_void_p], int]
) -> Iterator[None]:
    """Makes a context this thread's by the driver alone."""
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    assert make(driver, context) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    try:
        yield
    finally:
        popped = driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        ended = end(driver, context)
    assert (popped, ended) == (0, 0)


def test_a_request_goes_to_the_device_of_its_thread() -> None:
    for device in (1, 0):
        with torch.cuda.device(device):
            assert device_of_request() == device
    found = []
    with torch.cuda.device(1):
        thread = threading.Thread(target=lambda: found.append(device_of_request()))
        thread.start()
        thread.join()
        assert device_of_request() == 1
    assert found == [0], "a thread starts with the first device"


@pytest.mark.parametrize("device", [1, 0])
def test_a_request_goes_to_the_device_of_a_context_that_the_driver_was_given(device: int) -> None:
    torch.zeros(1, device=f"cuda:{device}")
    with current_context(
        lambda driver, found: driver.cuDevicePrimaryCtxRetain(ctypes.byref(found), device),
        lambda driver, _: driver.cuDevicePrimaryCtxRelease_v2(device),
    ):
        assert (torch.cuda.current_device(), device_of_request()) == (device, device)
    assert device_of_request() == 0


@on_a_card
def test_a_request_goes_to_the_device_of_a_context_of_the_programs_own() -> None:
    torch.zeros(1, device="cuda:1")

    def make(driver: ctypes.CDLL, made: ctypes.c_void_p) -> int:
        # The driver makes it current, too.
        status: int = driver.cuCtxCreate_v2(ctypes.byref(made), 0, 1) or driver.cuCtxPopCurrent_v2(ctypes.byref(made))
        return status

    with current_context(make, lambda driver, made: driver.cuCtxDestroy_v2(made)):
        assert (torch.cuda.current_device(), device_of_request()) == (1, 1)
    assert device_of_request() == 0


def test_a_request_goes_to_a_device_that_is_only_noted() -> None:
    """PyTorch leaves a device that it comes back to and that was never used for the next request to start."""
    program = (
        "import sys, torch; sys.path[:0] = sys.argv[1:]\n"
        "from test_devices import device_of_request\n"
        "torch.cuda.set_device(1); assert device_of_request() == 1\n"
        "torch._C._cuda_maybeExchangeDevice(0); assert torch.cuda.current_device() == 0\n"
        "assert not torch._C._cuda_hasPrimaryContext(0)\n"
        "assert [device_of_request() for _ in range(2)] == [0, 0]\n"
    )
    install = "" if IS_NATIVE else "import lowtide; lowtide.install()\n"
    here = Path(__file__).parent
    subprocess.run([sys.executable, "-c", install + program, here, here.parent], check=True, timeout=120)


@on_a_card
def test_ranks_reduce_into_memory_that_moves(tmp_path: Path) -> None:
    done, logs = run_ranks("moving_ranks.py", "tide", tmp_path)
    unmapped = re.findall(r"unmapped (\d+)", done.stdout)
    assert len(unmapped) == 2
    assert all(int(count) > 100 for count in unmapped), "no memory moved"
    assert done.stderr.count("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK is off") == 2
    # NCCL would not learn that other memory is there now.
    assert any("NCCL version" in log for log in logs)
    assert not any("register comm" in log for log in logs)
