"""CuPy and Numba take their memory from where PyTorch takes its own."""

import gc

import pytest

torch = pytest.importorskip("torch")

MIB = 1 << 20


def allocated() -> int:
    import lowtide

    return lowtide.memory_stats(0)["allocated_bytes.all.current"]


def test_cupy_shares_the_memory() -> None:
    cupy = pytest.importorskip("cupy")
    import lowtide.cupy

    lowtide.cupy.install()
    try:
        before = allocated()
        array = cupy.arange(MIB, dtype=cupy.float32)
        assert allocated() == before + 4 * MIB
        assert float(array.sum()) == float(MIB * (MIB - 1) / 2)
        # What CuPy lets go of, PyTorch is given next.
        address = array.data.ptr
        del array
        assert allocated() == before
        assert torch.empty(MIB, device="cuda").data_ptr() == address
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            cupy.empty(1 << 50, dtype=cupy.uint8)
    finally:
        cupy.cuda.set_allocator(None)


def test_numba_shares_the_memory() -> None:
    cuda = pytest.importorskip("numba.cuda")
    numpy = pytest.importorskip("numpy")
    import lowtide.numba

    lowtide.numba.install()
    before = allocated()
    numbers = numpy.arange(MIB, dtype=numpy.float32)
    array = cuda.to_device(numbers)
    assert allocated() == before + 4 * MIB
    seen, copied = torch.as_tensor(array, device="cuda"), array.copy_to_host()
    assert seen.sum().item() == pytest.approx(numbers.sum())
    assert (copied == numbers).all()
    del array, seen
    gc.collect()
    cuda.current_context().memory_manager.deallocations.clear()
    assert allocated() == before
    assert cuda.current_context().get_memory_info().total == torch.cuda.mem_get_info()[1]
