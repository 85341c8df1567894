"""Figures and snapshots of memory that was asked for through C."""

import json
from pathlib import Path
from sysconfig import get_path

from machine import Machine

ALLOCATE = """
    import ctypes, json, lowtide
    from lowtide._library import check, library

    def allocate(size, device=0):
        memory = ctypes.c_void_p()
        check(library().lowtide_allocate(size, device, None, ctypes.byref(memory)))
        return memory
"""


def test_figures_are_those_of_pytorch(gpu: Machine) -> None:
    printed = gpu.code(
        ALLOCATE,
        """
        memory = allocate(1000)
        held = lowtide.memory_stats()
        lowtide._library.check(library().lowtide_deallocate(memory))
        lowtide.empty_cache()
        print(json.dumps([held, lowtide.memory_stats(0), lowtide.memory_stats(1)]))
        """,
        FAKECUDA_DEVICES="2",
    )
    held, freed, other = json.loads(printed)
    assert held["allocated_bytes.all.current"] == 1024
    assert held["requested_bytes.all.current"] == 1000
    assert held["reserved_bytes.all.current"] == 2 << 20
    assert freed["reserved_bytes.all.current"] == 0
    assert freed["reserved_bytes.all.peak"] == 2 << 20
    assert other["reserved_bytes.all.peak"] == 0
    assert held.keys() == freed.keys() == other.keys()


def test_a_device_may_be_named_as_pytorch_does(machine: Machine) -> None:
    code = """
        import torch
        allocate(1000, device=1)
        devices = [None, 0, 1, "cuda:1", torch.device("cuda:1"), "cuda"]
        print([lowtide.memory_stats(device)["allocated_bytes.all.current"] for device in devices])
    """
    assert machine.code(ALLOCATE, code, FAKECUDA_DEVICES="2").strip() == "[0, 0, 1024, 1024, 1024, 0]"
    # The current device of the PyTorch of these tests is 1.
    printed = machine.code(ALLOCATE, code, FAKECUDA_DEVICES="2", FAKE_TORCH_STARTED="1")
    assert printed.strip() == "[1024, 0, 1024, 1024, 1024, 1024]"


def test_what_is_no_device_of_cuda_is_refused(machine: Machine) -> None:
    code = """
        import torch
        for device in ("cpu", torch.device("cpu"), 1 << 40, -(1 << 40)):
            try:
                print(len(lowtide.memory_stats(device)))
            except ValueError as error:
                print(str(error).split(",")[0])
    """
    large = 1 << 40
    refused = ["a device of CUDA is expected"] * 2 + [f"there is no device {large}", f"there is no device {-large}"]
    assert machine.code(ALLOCATE, code).splitlines() == refused


def test_a_snapshot_is_read_by_the_command(gpu: Machine) -> None:
    gpu.code(
        ALLOCATE,
        """
        allocate(1000), allocate(30 << 20)
        lowtide.dump_snapshot("held.pickle")
        sizes = sorted(segment["total_size"] for segment in lowtide.snapshot()["segments"])
        assert sizes == [2 << 20, 30 << 20], sizes
        """,
    )
    command = str(Path(get_path("scripts")) / "lowtide")
    done = gpu.command(command, "convert", "held.pickle", "held.lowtide")
    assert done.stdout == "held.lowtide: 0 events of 1 device\n", done


def test_errors_have_the_words_of_the_library(gpu: Machine) -> None:
    printed = gpu.code(
        ALLOCATE,
        """
        # Who asks before anything is in use starts no driver, which knows of no device then.
        assert lowtide.memory_stats(7)["reserved_bytes.all.current"] == 0
        allocate(1000)
        try:
            lowtide.memory_stats(7)
        except lowtide.Error as error:
            print(type(error).__name__, error)
        try:
            lowtide.memory_stats("cuda:0")
        except TypeError as error:
            print(error)
        print(lowtide.version())
        """,
    )
    lines = printed.splitlines()
    assert lines[0] == "Error there is no device 7: the driver shows 1"
    assert lines[1] == "a device is a number while PyTorch is not imported, not 'cuda:0'"
    assert lines[2].count(".") == 2


def test_without_a_driver_that_is_the_error(bare: Machine) -> None:
    printed = bare.code(
        ALLOCATE,
        """
        assert lowtide.memory_stats()["reserved_bytes.all.current"] == 0
        try:
            allocate(1000)
        except lowtide.NoDriverError as error:
            print(error)
        """,
    )
    assert printed.startswith("NVIDIA's driver cannot be loaded: libcuda.so.1")
