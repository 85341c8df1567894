"""lowtide by the names of torch_memory_saver: its regions, threads, backups and library."""

import ast
from pathlib import Path
from textwrap import dedent

import pytest
from machine import ALIAS, MEMORY, THREADS, Machine


def test_the_package_and_its_modules_have_the_other_names(machine: Machine) -> None:
    printed = machine.code(
        ALIAS,
        """
        import torch_memory_saver
        import torch_memory_saver.testing_utils as testing
        from torch_memory_saver import configure_subprocess
        from torch_memory_saver import torch_memory_saver as saver
        from torch_memory_saver.binary_wrapper import BinaryWrapper
        from torch_memory_saver.entrypoint import TorchMemorySaver
        from torch_memory_saver.hooks.base import HookMode, HookUtilBase
        from torch_memory_saver.hooks.mode_preload import HookUtilModePreload
        from torch_memory_saver.hooks.mode_torch import HookUtilModeTorch
        from torch_memory_saver.utils import change_env, get_binary_path_from_package, is_xpu
        lowtide.compat.install_as_torch_memory_saver()
        print(torch_memory_saver.__name__, type(saver) is TorchMemorySaver, saver.enabled, testing.get_device())
        print(get_binary_path_from_package("torch_memory_saver_hook_mode_preload").name, is_xpu())
        for mode in ("torch", "preload"):
            print(type(HookUtilBase.create(hook_mode=mode)).__name__)
        """,
    )
    assert printed.splitlines() == [
        "lowtide.compat.torch_memory_saver True True cuda",
        "liblowtide.so False",
        "HookUtilModeTorch",
        "HookUtilModePreload",
    ]


# Names and defaults of torch_memory_saver 0.0.10.
SIGNATURES = {
    "region": "tag='default', enable_cpu_backup=False, enable_disk_backup=False, cpu_backup_backend=None",
    "cuda_graph": (
        "cuda_graph, pool=None, stream=None, capture_error_mode='global', tag='default', enable_cpu_backup=False, "
        "cpu_backup_backend=None"
    ),
    "disable": "",
    "pause": "tag=None",
    "resume": "tag=None",
    "get_cpu_backup": "x, zero_copy=False",
    "set_disk_backup_dir": "path",
}


def test_its_functions_take_what_the_other_s_do(machine: Machine) -> None:
    printed = machine.code(
        f"names = {list(SIGNATURES)}\n",
        """\
import inspect
from lowtide.compat.torch_memory_saver import torch_memory_saver
for name in names:
    parameters = inspect.signature(getattr(torch_memory_saver, name)).parameters.values()
    print(", ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters
    ))
""",
    )
    assert printed.splitlines() == list(SIGNATURES.values())


def test_importing_it_installs_lowtide_and_starts_nothing(machine: Machine) -> None:
    printed = machine.code(
        ALIAS,
        """
        import ctypes, torch, torch_memory_saver
        driver = ctypes.CDLL("libcuda.so.1")
        driver.fakecuda_calls.restype = ctypes.c_uint64
        print(torch.cuda.memory.current is not None, driver.fakecuda_calls(b"cuInit"))
        """,
    )
    assert printed == "True 0\n"


def test_where_lowtide_cannot_be_installed_the_first_use_says_why(machine: Machine) -> None:
    printed = machine.code(
        ALIAS,
        """
        from torch_memory_saver import torch_memory_saver
        try:
            with torch_memory_saver.region():
                pass
        except lowtide.StartedError as error:
            print(error)
        """,
        FAKE_TORCH_STARTED="1",
    )
    assert printed.startswith("CUDA is in use already")


def test_another_package_of_the_name_that_is_in_use_is_an_error(machine: Machine) -> None:
    machine.write("torch_memory_saver.py", "")
    printed = machine.code(
        """
        import lowtide.compat, torch_memory_saver
        try:
            lowtide.compat.install_as_torch_memory_saver()
        except lowtide.Error as error:
            print(error)
        """
    )
    assert printed.startswith("torch_memory_saver has been imported already")


@pytest.mark.parametrize("mode", ["torch", "preload"])
def test_regions_are_lowtide_s(machine: Machine, mode: str) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        THREADS,
        f"mode = {mode!r}\n",
        """\
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = mode
with saver.region(enable_cpu_backup=True):
    kept = allocate(30 * MIB)
    with saver.region("inner", enable_disk_backup=True):
        on_disk = allocate(30 * MIB)
    allocate(512)
with saver.region("dropped"):
    allocate(1024)
allocate(2048)
print(live())
os.mkdir("files")
saver.set_disk_backup_dir("files/made")
write(kept, b"kept")
write(on_disk, b"disk")
for tag in (None, "default", "", "never used"):
    saver.pause(tag)
    saver.resume(tag)
saver.pause()
saver.pause()
saver.resume()
print(read(kept, 4), read(on_disk, 4), os.path.isdir("files/made"))
saver.retain_cpu_backup = True
print(saver.retain_cpu_backup)
""",
    )
    assert printed.splitlines() == [
        f"{{('default', 'host'): {(30 << 20) + 512}, ('inner', 'disk'): {30 << 20}, ('dropped', None): 1024}}",
        "b'kept' b'disk' True",
        "True",
    ]


@pytest.mark.parametrize("mode", ["torch", "preload"])
@pytest.mark.parametrize("backend", ["pinned", "mmap"])
def test_a_retained_backup_is_read_after_a_resume(machine: Machine, mode: str, backend: str) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        f"mode, backend = {mode!r}, {backend!r}\n",
        """\
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver.binary_wrapper import BinaryWrapper
saver.hook_mode = mode
cdll = BinaryWrapper().cdll
with saver.region("kept", enable_cpu_backup=True, cpu_backup_backend=backend):
    allocate(512)
    selected = allocate(3000)
with saver.region("other", enable_cpu_backup=True, cpu_backup_backend=backend):
    other = allocate(3000)
def backup(memory=selected, size=4):
    pointer = cdll.tms_get_cpu_backup_pointer(ctypes.cast(memory, ctypes.POINTER(ctypes.c_uint8)), size)
    return (ctypes.addressof(pointer.contents), bytes(pointer[:size])) if pointer else (None, None)
addresses = []
def show():
    address, content = backup()
    addresses.append(address)
    print(content, end=" ")
def cycle(content, retain):
    write(selected, content)
    saver.pause("kept")
    show()
    saver.retain_cpu_backup = retain
    saver.resume("kept")
    assert read(selected, 4) == content
    write(selected, b"late")
    show()
    saver.retain_cpu_backup = not retain
    show()
    saver.retain_cpu_backup = False
    print(read(selected, 4))
print(backup())
cycle(b"1111", False)
cycle(b"2222", True)
first = addresses[-1]
saver.pause("other")
saver.resume("other")
print(backup(), backup(other), first)
inside = selected + 2
print(backup(inside, 2)[1], backup(inside, 3000)[1], backup(inside, 2)[0] - first)
cycle(b"3333", True)
cycle(b"4444", False)
print(len(set(addresses[3:10])))
""",
    )
    lines = printed.splitlines()
    first = lines[3].rsplit(" ", 1)[1]
    assert lines == [
        "(None, None)",
        "b'1111' None None b'late'",
        "b'2222' b'2222' b'2222' b'late'",
        f"({first}, b'2222') (None, None) {first}",
        "b'22' None 2",
        "b'3333' b'3333' b'3333' b'late'",
        "b'4444' None None b'late'",
        "1",
    ]


@pytest.mark.parametrize("variables", [{}, {"TMS_INIT_CPU_BACKUP_BACKEND": "mmap"}])
def test_memory_of_the_host_goes_back_with_a_resume(machine: Machine, variables: dict[str, str]) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        f"backend = {None if variables else 'mmap'!r}\n",
        """\
from torch_memory_saver import torch_memory_saver as saver
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith("RssAnon:"))
with saver.region(enable_cpu_backup=True, cpu_backup_backend=backend):
    write(allocate(256 * MIB), bytes(256 * MIB))
before = resident()
saver.pause()
during = resident()
saver.resume()
print(during - before >= 192, resident() - during <= -192)
""",
        **variables,
    )
    assert printed == "True True\n"


def test_memory_of_the_host_goes_back_beside_a_copy(machine: Machine) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        """\
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver.binary_wrapper import BinaryWrapper
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith("RssAnon:"))
with saver.region("kept", enable_cpu_backup=True, cpu_backup_backend="mmap"):
    kept = allocate(4096)
with saver.region("large", enable_cpu_backup=True, cpu_backup_backend="mmap"):
    write(allocate(256 * MIB), bytes(256 * MIB))
write(kept, b"1111")
saver.retain_cpu_backup = True
saver.pause("kept")
saver.resume("kept")
saver.retain_cpu_backup = False
saver.pause("large")
during = resident()
saver.resume("large")
print(resident() - during <= -192)
write(kept, b"2222")
pointer = BinaryWrapper().cdll.tms_get_cpu_backup_pointer(ctypes.cast(kept, ctypes.POINTER(ctypes.c_uint8)), 4)
print(bytes(pointer[:4]))
""",
    )
    assert printed == "True\nb'1111'\n"


# What the driver says of memory of the host.
LOCKED = """
    driver = ctypes.CDLL("libcuda.so.1")

    def is_locked(address):
        kind = ctypes.c_uint()
        return driver.cuPointerGetAttribute(ctypes.byref(kind), 2, ctypes.c_void_p(address)) == 0
"""


@pytest.mark.parametrize("mode", ["torch", "preload"])
@pytest.mark.parametrize("is_paused", [False, True])
def test_a_region_that_is_not_used_ends_with_its_pool(machine: Machine, mode: str, is_paused: bool) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        LOCKED,
        f"mode, is_paused = {mode!r}, {is_paused}\n",
        """\
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = mode
keys = [("t", True, False, "pinned", 0), ("t", False, False, "", 0), ("f", False, True, "", 0)]
def inside(*tag, **options):
    with saver.region(*tag, **options):
        return allocate(4096)
held = [inside("t", enable_cpu_backup=True), inside("t"), inside("f", enable_disk_backup=True)]
impl = saver._impl
print(list(impl._mem_pools) == keys)
find = impl._binary_wrapper.cdll.tms_get_cpu_backup_pointer
def copy():
    pointer = find(ctypes.cast(held[0], ctypes.POINTER(ctypes.c_uint8)), 4)
    return ctypes.addressof(pointer.contents) if pointer else None
def states():
    return " ".join(f"{seen['tag']}:{seen['state']}:{seen['live_bytes']}" for seen in lowtide.regions())
write(held[0], b"kept")
saver.retain_cpu_backup = True
saver.pause()
if not is_paused:
    saver.resume()
address = copy()
lowtide._regions.page_lock_backups()
# Who has the pool, or a block, has what goes with it.
pool = impl._mem_pools.pop(keys[0])
print(copy() == address, is_locked(address), read(address, 4))
with saver.region("t", enable_cpu_backup=True):
    pass
del pool, impl._mem_pools[keys[0]]
print(copy() == address, is_locked(address), states())
with saver.region("t", enable_cpu_backup=True):
    pass
pool = impl._mem_pools.pop(keys[0])
with impl._with_region_config(tag="t", enable_cpu_backup=True, cpu_backup_backend="pinned"):
    free(held[0])
    del pool
    print(is_locked(address), states())
    held[0] = allocate(512)
print(states())
free(held[1])
impl._mem_pools.clear()
print(states())
""",
    )
    state = "paused" if is_paused else "mapped"
    rest = f"t:{state}:4096 f:{state}:4096"
    assert printed.splitlines() == [
        "True",
        "True True b'kept'",
        f"True True t:{state}:4096 {rest}",
        f"False t:mapped:0 {rest}",
        f"t:mapped:512 {rest}",
        f"t:mapped:512 t:mapped:0 f:{state}:4096",
    ]


@pytest.mark.parametrize(("options", "waits"), [({}, True), ({"cpu_backup_backend": "mmap"}, False)])
def test_the_very_backup_is_page_locked(machine: Machine, options: dict[str, str], waits: bool) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        LOCKED,
        f"options = {options}\n",
        """\
from types import SimpleNamespace
from torch_memory_saver import torch_memory_saver as saver
from lowtide import _regions
with saver.region(enable_cpu_backup=True, **options):
    memory = allocate(256 * MIB)
find = saver._impl._binary_wrapper.cdll.tms_get_cpu_backup_pointer
def find_backup(tensor):
    pointer = find(ctypes.cast(memory, ctypes.POINTER(ctypes.c_uint8)), 4)
    return SimpleNamespace(start=ctypes.addressof(pointer.contents), clone=lambda: None)
lock, locks = _regions.page_lock_backups, []
_regions.find_backup = find_backup
_regions.page_lock_backups = lambda: locks.append(lock())
tensor = SimpleNamespace(is_cuda=True, is_contiguous=lambda: True)
locked = []
for _ in range(10):
    saver.pause()
    saver.get_cpu_backup(tensor)
    print(len(locks), end=" ")
    start = saver.get_cpu_backup(tensor, zero_copy=True).start
    locked += [is_locked(start + block * 16 * MIB) for block in range(16) if locks]
    print(len(locks), end=" ")
    saver.resume()
    lowtide.release_backups()
    locks.clear()
print(len(locked), all(locked))
""",
    )
    assert printed.split() == ["0", "1" if waits else "0"] * 10 + ["160" if waits else "0", "True"]


def test_its_library_has_the_functions_of_cuda_s_runtime(machine: Machine, driver_directory: Path) -> None:
    code = (
        ALIAS,
        """
        from torch_memory_saver import torch_memory_saver as saver
        saver._ensure_initialized()
        cdll = saver._impl._binary_wrapper.cdll
        print(*(hasattr(cdll, name) for name in ("tms_pause", "cuMemHostAlloc", "tms_xpu_prewarm_devices")))
        """,
    )
    assert machine.code(*code) == "True False False\n"
    # The stand-in driver stands in for the runtime, too.
    runtime = machine.directory / "libcudart.so.13"
    runtime.symlink_to((driver_directory / "libcuda.so.1").resolve())
    path = f"{machine.environment['LD_LIBRARY_PATH']}:{machine.directory}"
    assert machine.code(*code, LD_LIBRARY_PATH=path) == "True True False\n"


def test_backups_on_disk_are_files_to_be_seen(machine: Machine) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        """
        from torch_memory_saver import torch_memory_saver as saver
        saver.set_disk_backup_dir("files")
        with saver.region(enable_disk_backup=True):
            large, small = allocate(30 * MIB), allocate(512)
        with saver.region():
            allocate(5 * MIB)
        sizes = lambda: [os.path.getsize(f"files/{name}") for name in os.listdir("files")]
        for _ in range(2):
            write(large, b"large")
            saver.pause()
            print(len(sizes()), sum(sizes()) >= 30 * MIB)
            saver.resume()
            print(sizes(), read(large, 5))
        """,
    )
    assert printed.splitlines() == ["2 True", "[] b'large'"] * 2


@pytest.mark.parametrize("is_process", [False, True])
def test_regions_of_both_kinds_nest(machine: Machine, is_process: bool) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        THREADS,
        """
        import torch
        torch.cuda.MemPool, torch.cuda.use_mem_pool = lambda: None, lambda pool, device: nullcontext()
        torch.cuda.current_device = lambda: 0
        from torch_memory_saver import torch_memory_saver as saver
        with saver.region("a"):
            with lowtide.region("r"):
                with saver.region("b", enable_cpu_backup=True):
                    allocate(1 << 9)
                    with saver.disable():
                        allocate(1 << 20)
                    allocate(1 << 10)
                allocate(1 << 11)
                with saver.region("a"):
                    allocate(1 << 12)
                    with lowtide.disable(), saver.region("r"):
                        allocate(1 << 13)
                with saver.disable():
                    allocate(1 << 20)
                allocate(1 << 14)
            allocate(1 << 15)
        with lowtide.region("r"):
            with saver.region("r"):
                allocate(1 << 16)
            allocate(1 << 17)
        allocate(1 << 18)
        print(live())
        """,
        **({"TMS_INIT_ENABLE": "1"} if is_process else {}),
    )
    sizes: dict[tuple[str, str | None], int] = {
        ("a", None): (1 << 12) + (1 << 15),
        ("r", None): sum(1 << bit for bit in (11, 13, 14, 16, 17)),
    }
    sizes[("b", "host")] = (1 << 9) + (1 << 10)
    if is_process:
        sizes[("default", None)] = 1 << 18
    assert ast.literal_eval(printed) == sizes


def test_generators_may_leave_regions_in_another_order(machine: Machine) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        """
        from torch_memory_saver import torch_memory_saver as saver

        def part(tag, size):
            with saver.region(tag):
                yield
                allocate(size)
                yield

        def other_part(tag, size):
            with lowtide.region(tag):
                yield
                allocate(size)
                yield

        for first, one, second, other in (
            ("a", part, "b", part),
            ("a", part, "a", part),
            ("c", part, "d", other_part),
            ("e", other_part, "f", part),
        ):
            one, other = one(first, 1 << 9), other(second, 1 << 10)
            next(one), next(other)
            next(one)
            one.close()
            allocate(1 << 11)
            next(other)
            other.close()
            # Outside of every region.
            allocate(1 << 20)
            with lowtide.region("r"):
                allocate(1 << 12)
        print(live())
        """,
    )
    size = (1 << 9) + (1 << 10) + (1 << 11)
    sizes = {"a": size, "b": size, "c": 0, "d": size, "e": 0, "f": size, "r": 1 << 14}
    assert ast.literal_eval(printed) == {(tag, None): sizes[tag] for tag in sizes}


def test_disable_is_in_the_order_of_regions(machine: Machine) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        THREADS,
        """
        import torch
        from contextlib import contextmanager
        from torch_memory_saver import torch_memory_saver as saver
        pools, log = iter(range(100)), []

        @contextmanager
        def use_mem_pool(pool, device):
            log.append(f"in {pool}")
            yield
            log.append(f"out {pool}")

        torch.cuda.MemPool, torch.cuda.use_mem_pool = lambda: next(pools), use_mem_pool
        torch.cuda.current_device = lambda: 0

        def within(*contexts):
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context())
                yield

        def enter(*contexts):
            generator = within(*contexts)
            next(generator)
            return generator

        # A region that ends within `disable`.
        first = enter(lambda: saver.region("a"))
        with saver.disable():
            first.close()
            allocate(1 << 20)
        allocate(1 << 20)
        # `disable` and its region, which end within another region.
        with lowtide.region("r"):
            first = enter(lambda: saver.region("b"), saver.disable)
            second = enter(lambda: saver.region("c"))
            first.close()
            allocate(1 << 9)
            second.close()
            allocate(1 << 10)
        # `disable` alone, likewise.
        with saver.region("d"):
            first = enter(saver.disable)
            second = enter(lambda: saver.region("e"))
            first.close()
            allocate(1 << 11)
            second.close()
            allocate(1 << 12)
        allocate(1 << 20)
        print({tag: size for (tag, _), size in live().items() if size}, log[-1])
        print(sum(text.startswith("in") for text in log) == sum(text.startswith("out") for text in log))
        """,
    )
    assert printed.splitlines() == [f"{ {'r': 1 << 10, 'c': 1 << 9, 'd': 1 << 12, 'e': 1 << 11} } out 2", "True"]


@pytest.mark.parametrize("options", ["tag=None", "tag=''", "enable_cpu_backup=True, cpu_backup_backend='pined'"])
def test_a_region_that_is_refused_leaves_the_one_around_it(machine: Machine, options: str) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        f"options = dict({options})\n",
        """\
from torch_memory_saver import torch_memory_saver as saver
with saver.region("outer"):
    try:
        with saver.region(**options):
            pass
    except (TypeError, ValueError) as error:
        print(error)
    allocate(1 << 12)
allocate(1 << 20)
print(live())
""",
    )
    error, sizes = printed.splitlines()
    assert error in (
        "a tag is a text: not None",
        "a tag has characters, none of them zero: not ''",
        "cpu_backup_backend is mmap or pinned, not 'pined'",
    )
    assert ast.literal_eval(sizes) == {("outer", None): 1 << 12}


def test_options_are_refused_as_by_the_other(machine: Machine) -> None:
    printed = machine.code(
        """
        from lowtide.compat.torch_memory_saver import torch_memory_saver as saver

        def refused(act):
            try:
                act()
            except Exception as error:
                print(type(error).__name__)

        def enter(**options):
            with saver.region(**options):
                pass

        refused(lambda: saver.hook_mode)
        refused(lambda: enter(cpu_backup_backend="mmap"))
        refused(lambda: enter(enable_cpu_backup=True, enable_disk_backup=True))
        refused(lambda: saver.disable().__enter__())
        refused(lambda: setattr(saver, "hook_mode", "torch"))
        """
    )
    errors = "AttributeError ValueError AssertionError AssertionError AssertionError"
    assert printed.split() == errors.split()


def test_a_directory_for_backups_is_made(machine: Machine) -> None:
    code = (
        MEMORY,
        """
        from lowtide.compat.torch_memory_saver import torch_memory_saver as saver
        from lowtide.compat.torch_memory_saver.binary_wrapper import BinaryWrapper
        kept = allocate(30 * MIB)
        print(live(), refusal(saver.pause))
        BinaryWrapper().cdll.tms_set_disk_backup_dir(b"another/one")
        saver.pause()
        print(len(os.listdir("another/one")))
        """,
    )
    machine.write("file", "")
    variables = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_DISK_BACKUP": "1", "TMS_DISK_BACKUP_DIR": "file/deep"}
    done = machine.run("-c", "".join(map(dedent, code)), **variables)
    refused, files = done.stdout.splitlines()
    # It is the directory all the same, and the process in its region.
    assert refused.startswith(f"{{('default', 'disk'): {30 << 20}}} BackupError "), done
    assert f'a backup in "{machine.directory}/file/deep" could not be made (Not a directory' in refused
    assert files == "1"
    assert 'lowtide: "file/deep" for backups could not be made: Not a directory (os error 20)' in done.stderr


def test_a_margin_of_the_device_is_left_to_others(machine: Machine) -> None:
    printed = machine.code(
        MEMORY,
        THREADS,
        """
        from lowtide.compat.torch_memory_saver import torch_memory_saver as saver
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        check(library().lowtide_memory_info(0, ctypes.byref(free), ctypes.byref(total)))
        assert saver.memory_margin_bytes == 0
        saver.memory_margin_bytes = free.value - 100 * MIB
        assert saver.memory_margin_bytes == free.value - 100 * MIB
        def most(size):
            try:
                return allocate(size) > 0
            except lowtide.Error as error:
                return str(error).splitlines()[0][:20]
        with saver.region():
            print(most(60 * MIB), most(60 * MIB))
        print(most(60 * MIB))
        """,
    )
    assert printed.splitlines() == ["True CUDA out of memory. ", "True"]


def test_the_functions_of_c_keep_a_thread_s_state(gpu: Machine) -> None:
    printed = gpu.code(
        MEMORY,
        THREADS,
        """
        from lowtide.compat.torch_memory_saver.binary_wrapper import BinaryWrapper
        wrapper = BinaryWrapper()
        saver = wrapper.cdll
        print(wrapper.get_config())
        saver.tms_set_current_tag(b"kv")
        saver.tms_set_interesting_region(True)
        memory = allocate(512)
        saver.tms_set_enable_disk_backup(True)
        saver.tms_set_enable_disk_backup(False)
        saver.tms_set_enable_cpu_backup(True)
        saver.tms_set_cpu_backup_backend(b"mmap")
        kept = allocate(1024)
        print(wrapper.get_config(), in_thread(wrapper.get_config)["interesting_region"])
        saver.tms_set_interesting_region(False)
        allocate(2048)
        print(live())
        write(kept, b"kept")
        pointer = ctypes.cast(kept, ctypes.POINTER(ctypes.c_uint8))
        print(bool(saver.tms_get_cpu_backup_pointer(pointer, 4)), saver.tms_pause(b"kv"))
        copy = saver.tms_get_cpu_backup_pointer(pointer, 4)
        print(bytes(copy[:4]), saver.tms_resume(None), read(kept, 4), saver.tms_pause(b"never used"))
        """,
    )
    assert printed.splitlines() == [
        "{'tag': 'default', 'interesting_region': False, 'enable_cpu_backup': False, 'cpu_backup_backend': 'pinned', "
        "'enable_disk_backup': False}",
        "{'tag': 'kv', 'interesting_region': True, 'enable_cpu_backup': True, 'cpu_backup_backend': 'mmap', "
        "'enable_disk_backup': False} False",
        "{('kv', None): 512, ('kv', 'disk'): 0, ('kv', 'host'): 1024}",
        "False 0",
        "b'kept' 0 b'kept' 0",
    ]
