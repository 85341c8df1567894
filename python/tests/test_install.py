"""`lowtide.install()`: what it refuses, and what it does without the shim."""

import pytest
from machine import Machine

INSTALL = """
    import lowtide
    try:
        lowtide.install({arguments})
    except lowtide.Error as error:
        print(type(error).__name__, error)
    else:
        import torch
        print("installed", torch.cuda.memory.current is not None)
"""


def install(machine: Machine, arguments: str = "", **variables: str) -> str:
    return machine.code(INSTALL.format(arguments=arguments), **variables).strip()


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        (
            "'best'",
            {},
            "ConfigError Unknown strategy 'best', options are direct, pool, buddy, slab, bfc, caching, tide",
        ),
        ("'bfc:fast:1'", {}, "ConfigError Unrecognized key 'fast'"),
        ("'bfc:a:1', 'b:2'", {}, "ConfigError the options are given twice"),
        ("config='x:1'", {}, "ConfigError Unrecognized key 'x'"),
        ("'b\\0'", {}, "ConfigError a zero byte in 'b\\x00'"),
        ("", {"LOWTIDE_STRATEGY": "best"}, "ConfigError Unknown strategy 'best'"),
        ("'caching'", {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, "ConfigError Unrecognized key 'x'"),
        (
            "'bfc'",
            {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},
            "ConfigError PYTORCH_ALLOC_CONF asks for backend:cudaMallocAsync",
        ),
        ("", {"FAKE_TORCH_VERSION": "2.5.1"}, "TorchError PyTorch 2.5.1 is too old: lowtide needs 2.6"),
        ("", {"FAKE_TORCH_VERSION": "1.13.0a0+git1"}, "TorchError PyTorch 1.13.0a0+git1 is too old"),
        ("", {"FAKE_TORCH_CUDA": ""}, "TorchError this PyTorch, 2.11.0+cu130, is built without CUDA"),
        ("", {"FAKE_TORCH_STARTED": "1"}, "StartedError CUDA is in use already: call lowtide.install()"),
        ("", {"FAKE_TORCH_IN_USE": "1"}, "StartedError CUDA is in use already: call lowtide.install()"),
        ("", {"LD_LIBRARY_PATH": ""}, "NoDriverError NVIDIA's driver cannot be loaded: libcuda.so.1"),
    ],
)
def test_each_refusal_is_one_line(machine: Machine, arguments: str, variables: dict[str, str], expected: str) -> None:
    printed = install(machine, arguments, **variables)
    assert printed.startswith(expected)
    assert len(printed.splitlines()) == 1


def test_a_variable_that_pytorch_ignores_is_no_obstacle(machine: Machine) -> None:
    ignored = {"PYTORCH_HIP_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
    assert install(machine, "", **ignored) == "installed True"


def test_pytorch_that_is_not_there_is_named(gpu: Machine) -> None:
    expected = "TorchError PyTorch cannot be imported (No module named 'torch'): pip install torch"
    assert install(gpu) == expected


def test_without_the_shim_one_line_says_why(machine: Machine) -> None:
    code = INSTALL.format(arguments="")
    done = machine.run("-c", code.replace("\n    ", "\n"), FAKE_TORCH_VERSION="2.7.1")
    assert done.stdout == "installed True\n", done
    assert done.stderr == (
        "lowtide: without the shim torch.cuda knows nothing about memory: "
        "it is for PyTorch 2.8 to 2.15, and this is 2.7.1\n"
    )


def test_a_shim_that_cannot_be_built_is_no_reason_to_stop(machine: Machine) -> None:
    code = INSTALL.format(arguments="")
    done = machine.run("-c", code.replace("\n    ", "\n"), CXX="no-such-compiler")
    assert done.stdout == "installed True\n", done
    (line,) = done.stderr.splitlines()
    assert line.startswith("lowtide: without the shim torch.cuda knows nothing about memory: ")


def test_the_pluggable_interface_is_served(machine: Machine) -> None:
    printed = machine.code(
        """
        import ctypes, lowtide
        lowtide.install()
        import torch
        allocator = torch.cuda.memory.current
        allocator.allocate.restype = ctypes.c_void_p
        allocator.allocate.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        allocator.free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

        def hook(name, *types):
            return ctypes.CFUNCTYPE(None, *types)(allocator.hooks.addresses[name])

        def pools():
            return {segment["segment_pool_id"] for segment in lowtide.snapshot()["segments"]}

        hook("set_init_fn", ctypes.c_int)(1)
        memory = allocator.allocate(1000, 0, None)
        hook("set_record_stream_fn", ctypes.c_void_p, ctypes.c_void_p)(memory, None)
        assert pools() == {(0, 0)}, pools()
        # As PyTorch calls it: the pair in two registers, the filter by reference.
        pool = ctypes.c_uint64
        begin = hook("set_begin_allocate_to_pool", ctypes.c_int, pool, pool, ctypes.c_void_p)
        begin(0, 7, 0, 0xdead)
        graph = allocator.allocate(1000, 0, None)
        assert pools() == {(0, 0), (7, 0)}, pools()
        hook("set_end_allocate_to_pool_fn", ctypes.c_int, pool, pool)(0, 7, 0)
        more = allocator.allocate(1000, 0, None)
        for block in (memory, graph, more):
            allocator.free(block, 1000, 0, None)
        hook("set_reset_fn")()
        assert pools() == {(7, 0)}, pools()
        hook("set_release_pool", ctypes.c_int, pool, pool)(0, 7, 0)
        hook("set_reset_fn")()
        assert pools() == set(), pools()
        hook("set_memory_fraction_fn", ctypes.c_double, ctypes.c_int)(0.25, 0)
        base = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t))(
            allocator.hooks.addresses["set_base_alloc_fn"]
        )
        memory, size = allocator.allocate(1000, 0, None), ctypes.c_size_t()
        print(base(memory, ctypes.byref(size)) == memory, size.value)
        """
    )
    assert printed == f"True {2 << 20}\n"


def test_no_event_is_queried_while_a_graph_is_captured(machine: Machine) -> None:
    printed = machine.code(
        """
        import ctypes, lowtide
        lowtide.install()
        import torch
        driver = ctypes.CDLL("libcuda.so.1")
        driver.fakecuda_calls.restype = ctypes.c_uint64
        allocator = torch.cuda.memory.current
        allocator.allocate.restype = ctypes.c_void_p
        allocator.allocate.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        allocator.free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

        def hook(name, *types):
            return ctypes.CFUNCTYPE(None, *types)(allocator.hooks.addresses[name])

        pool = ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64
        memory = allocator.allocate(1000, 0, None)
        context, side = ctypes.c_void_p(), ctypes.c_void_p()
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert driver.cuCtxSetCurrent(context) == 0
        assert driver.cuStreamCreate(ctypes.byref(side), 1) == 0
        hook("set_record_stream_fn", ctypes.c_void_p, ctypes.c_void_p)(memory, side)
        allocator.free(memory, 1000, 0, None)
        hook("set_begin_allocate_to_pool", *pool, ctypes.c_void_p)(0, 7, 0, 0xdead)
        allocator.allocate(1000, 0, None)
        print(driver.fakecuda_calls(b"cuEventQuery"))
        hook("set_end_allocate_to_pool_fn", *pool)(0, 7, 0)
        allocator.allocate(1000, 0, None)
        print(driver.fakecuda_calls(b"cuEventQuery"))
        """
    )
    # An event that has not passed yet is asked for again.
    captured, after = map(int, printed.split())
    assert captured == 0 < after


def test_a_pool_that_cannot_be_begun_is_told(machine: Machine) -> None:
    done = machine.run(
        "-c",
        "import ctypes, lowtide; lowtide.install(); import torch\n"
        "address = torch.cuda.memory.current.hooks.addresses['set_begin_allocate_to_pool']\n"
        "types = ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p\n"
        "ctypes.CFUNCTYPE(None, *types)(address)(9, 7, 0, None)\n",
    )
    assert done.returncode == 0
    assert done.stderr.endswith("lowtide: there is no device 9: the driver shows 1\n")
    assert done.stderr.count("there is no device 9") == 1


def test_a_second_call_may_still_choose(machine: Machine) -> None:
    printed = machine.code(
        """
        import lowtide
        lowtide.install()
        lowtide.install("bfc")
        lowtide.memory_stats()
        lowtide.install()
        try:
            lowtide.install("buddy")
        except lowtide.StartedError as error:
            print(error)
        """
    )
    assert printed == "lowtide is in use already: configure it before the first request\n"


def test_nothing_starts_the_driver(machine: Machine) -> None:
    # A process that forks after cuInit cannot use CUDA in the child.
    printed = machine.code(
        """
        import ctypes, lowtide
        lowtide.install()
        driver = ctypes.CDLL("libcuda.so.1")
        driver.fakecuda_calls.restype = ctypes.c_uint64
        print(driver.fakecuda_calls(b"cuInit"))
        """
    )
    assert printed == "0\n"


REGISTRATION = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"


@pytest.mark.parametrize(
    ("strategies", "name", "value", "is_left"),
    [
        (["tide"], REGISTRATION, "1", False),
        (["tide"], "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "True", False),
        (["caching:expandable_segments:True"], REGISTRATION, "yes", False),
        (["caching", "tide"], REGISTRATION, "1", False),
        (["tide", "caching"], REGISTRATION, "1", True),
        (["caching"], REGISTRATION, "1", True),
        (["tide"], REGISTRATION, "0", True),
        # PyTorch refuses it.
        (["tide"], REGISTRATION, "on", True),
    ],
)
def test_nccl_registers_no_memory_that_moves(
    machine: Machine, strategies: list[str], name: str, value: str, is_left: bool
) -> None:
    machine.write(
        "script.py",
        f"""
        import os, lowtide
        for strategy in {strategies}:
            lowtide.install(strategy)
        print(os.environ.get("{name}"))
        """,
    )
    done = machine.run("script.py", **{name: value})
    assert done.stdout == (f"{value}\n" if is_left else "None\n"), done
    if not is_left:
        line = f"{name} is off, because {strategies[-1]} maps other memory at the same addresses; caching does not\n"
        assert done.stderr.count(line) == 1, done
