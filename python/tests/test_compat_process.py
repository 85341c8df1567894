"""torch_memory_saver by lowtide in whole processes: what variables say of them, and of their children."""

import shutil
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from machine import ALIAS, MEMORY, THREADS, Machine

CHILD = """
    import sys
    import torch
    import torch_memory_saver
    print(torch_memory_saver.__name__, torch.cuda.memory.current is not None)
"""


def test_without_pytorch_a_child_cannot_be_configured(gpu: Machine) -> None:
    code = """
        from lowtide.compat.torch_memory_saver import configure_subprocess
        try:
            configure_subprocess().__enter__()
        except RuntimeError as error:
            print(error)
    """
    done = gpu.run("-c", dedent(code))
    assert done.stdout == "PyTorch cannot be imported (No module named 'torch'): pip install torch\n"


def test_what_programs_preload_is_beside_the_package(machine: Machine) -> None:
    path = machine.code(
        ALIAS,
        """
        import os, torch_memory_saver
        package = os.path.dirname(torch_memory_saver.__file__)
        print(os.path.join(os.path.dirname(package), "torch_memory_saver_hook_mode_preload.abi3.so"))
        """,
    ).strip()
    printed = machine.code(
        f"""
        import ctypes
        from lowtide._library import library
        inside = ctypes.CDLL({path!r}).tms_get_interesting_region
        inside.restype = ctypes.c_bool
        assert ctypes.CDLL(None).tms_pause
        library().tms_set_interesting_region(True)
        print(inside())
        """,
        LD_PRELOAD=path,
    )
    assert printed == "True\n"


def test_a_child_of_a_fork_leaves_a_region_with_one_line(machine: Machine) -> None:
    machine.write(
        "script.py",
        """
        import os, lowtide, lowtide._library as c
        from lowtide.compat.torch_memory_saver import torch_memory_saver as saver
        c.library().lowtide_allocate(512, 0, None, c.ctypes.byref(c.ctypes.c_void_p()))
        with saver.region("a"):
            child = os.fork()
        if child == 0:
            own = os.fork()
            if own == 0:
                # One that nobody has told is told, too, and once.
                os._exit([c.library().lowtide_malloc(512, 0, None) for _ in range(2)] != [None, None])
            os._exit(5 + os.waitpid(own, 0)[1])
        print(os.waitpid(child, 0)[1] >> 8)
        """,
    )
    done = machine.run("script.py")
    assert done.stdout == "5\n"
    lines = [line for line in done.stderr.splitlines() if "shim" not in line]
    assert len(lines) == 2, lines
    assert lines[0] == lines[1]
    assert lines[0].startswith("lowtide: this process was forked from one that had started CUDA")


def test_a_child_with_variables_that_are_not_clear_is_told_by_its_import(machine: Machine) -> None:
    machine.write(
        "script.py",
        """
        import os, subprocess, sys
        subprocess.run([sys.executable, "child.py"], env={**os.environ, "TMS_RETAIN_CPU_BACKUP": "2"})
        """,
    )
    machine.write(
        "child.py",
        """
        import os, sys
        for value in ("2", "3", "1"):
            os.environ["TMS_RETAIN_CPU_BACKUP"] = value
            try:
                import torch_memory_saver
            except ValueError as error:
                print(error)
        ours = "lowtide.compat.torch_memory_saver"
        import torch_memory_saver as again
        print(torch_memory_saver is again is sys.modules[ours], again.__name__, again.__spec__.name)
        """,
    )
    done = machine.run("-m", "lowtide", "run", "script.py", LOWTIDE_COMPAT="torch_memory_saver")
    ours = "lowtide.compat.torch_memory_saver"
    assert done.stdout.splitlines() == [
        "TMS_RETAIN_CPU_BACKUP is '2', and can be 0 or 1",
        "TMS_RETAIN_CPU_BACKUP is '3', and can be 0 or 1",
        f"True {ours} {ours}",
    ]


def test_a_whole_process_can_be_in_a_region(machine: Machine) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        THREADS,
        """
        import torch
        torch.cuda.MemPool, torch.cuda.use_mem_pool = lambda: None, lambda pool, device: nullcontext()
        torch.cuda.current_device = lambda: 0
        from torch_memory_saver import torch_memory_saver as saver
        allocate(512)
        in_thread(lambda: allocate(1024))
        with saver.region("apart"):
            allocate(2048)
        with saver.disable():
            allocate(4096)
        with lowtide.disable():
            allocate(4096)
        allocate(8192)
        print(live())
        """,
        TMS_INIT_ENABLE="1",
        TMS_INIT_ENABLE_CPU_BACKUP="1",
    )
    assert printed == "{('default', 'host'): 9728, ('apart', None): 2048}\n"


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"TMS_INIT_ENABLE": "foo"}, "TMS_INIT_ENABLE is 'foo', and can be 0 or 1"),
        ({"TMS_INIT_ENABLE_CPU_BACKUP": "maybe"}, "TMS_INIT_ENABLE_CPU_BACKUP is 'maybe', and can be 0 or 1"),
        ({"TMS_RETAIN_CPU_BACKUP": "x"}, "TMS_RETAIN_CPU_BACKUP is 'x', and can be 0 or 1"),
        ({"TMS_INIT_CPU_BACKUP_BACKEND": "foo"}, "TMS_INIT_CPU_BACKUP_BACKEND is 'foo', and can be mmap or pinned"),
        (
            {"TMS_INIT_ENABLE_CPU_BACKUP": "1", "TMS_INIT_ENABLE_DISK_BACKUP": "1"},
            "TMS_INIT_ENABLE_CPU_BACKUP and TMS_INIT_ENABLE_DISK_BACKUP are both set: a region has a backup on the CPU "
            "or on disk, not both",
        ),
    ],
)
def test_variables_that_are_not_clear_are_refused(machine: Machine, variables: dict[str, str], error: str) -> None:
    script = "from lowtide.compat.torch_memory_saver import torch_memory_saver"
    (machine.directory / "script.py").write_text(script)
    for arguments in (["run", "script.py"], ["run", "--preload", sys.executable, "script.py"]):
        done = machine.run("-m", "lowtide", *arguments, LOWTIDE_COMPAT="torch_memory_saver", **variables)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"lowtide: {error}\n")
    done = machine.run("script.py", **variables)
    assert done.stderr.splitlines()[-1] == f"lowtide._errors.ConfigError: {error}"


def test_the_library_says_what_it_takes_variables_for_that_are_not_clear(gpu: Machine) -> None:
    code = """
        import ctypes
        from lowtide._library import library
        functions = library()
        for _ in range(2):
            print(functions.tms_get_interesting_region(), functions.tms_get_enable_cpu_backup())
        functions.tms_set_cpu_backup_backend(b"pined")
        print(functions.tms_get_cpu_backup_backend())
    """
    variables = ("TMS_INIT_ENABLE", "TMS_INIT_ENABLE_CPU_BACKUP", "TMS_INIT_CPU_BACKUP_BACKEND")
    done = gpu.run("-c", dedent(code), **dict.fromkeys(variables, "maybe"))
    assert done.stdout.splitlines() == ["False True", "False True", "b'pinned'"]
    assert done.stderr.splitlines() == [
        "lowtide: TMS_INIT_ENABLE is 'maybe', and can be 0 or 1; it is taken for 0",
        "lowtide: TMS_INIT_ENABLE_CPU_BACKUP is 'maybe', and can be 0 or 1; it is taken for 1",
        "lowtide: TMS_INIT_CPU_BACKUP_BACKEND is 'maybe', and can be pinned or mmap; it is taken for pinned",
        'lowtide: a backend is pinned or mmap, not "pined"',
    ]


def test_a_whole_process_can_be_kept_on_disk(machine: Machine) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        THREADS,
        """\
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver.utils import get_binary_path_from_package
# By this trainers tell whether the library can do it, before they ask for it.
its_library = get_binary_path_from_package("torch_memory_saver_hook_mode_preload")
assert b"TMS_INIT_ENABLE_DISK_BACKUP" in its_library.read_bytes()
kept = allocate(30 * MIB)
write(kept, b"kept")
print(live())
for _ in range(2):
    saver.pause()
    sizes = [os.stat(os.path.join("files/made", name)).st_size for name in os.listdir("files/made")]
    print(len(sizes), sum(sizes) >= 30 * MIB, [seen["disk_bytes"] // MIB for seen in lowtide.regions()])
    saver.resume()
    print(read(kept, 4), os.listdir("files/made"), [seen["disk_bytes"] for seen in lowtide.regions()])
""",
        TMS_INIT_ENABLE="1",
        TMS_INIT_ENABLE_DISK_BACKUP="1",
        TMS_DISK_BACKUP_DIR="files/made",
    )
    away, back = "1 True [30]", "b'kept' [] [0]"
    assert printed.splitlines() == [f"{{('default', 'disk'): {30 << 20}}}", away, back, away, back]


def test_the_process_is_in_its_region_before_the_other_is_imported(machine: Machine) -> None:
    machine.write("regions.py", MEMORY)
    machine.write(
        "script.py",
        """
        import torch
        from regions import *
        allocate(10 * MIB)
        import torch_memory_saver
        allocate(20 * MIB)
        torch_memory_saver.torch_memory_saver.pause()
        print(live(), lowtide.memory_stats(0)["allocated_bytes.all.current"] >> 20)
        """,
    )
    done = machine.run(
        *("-m", "lowtide", "run", "script.py"), LOWTIDE_COMPAT="vllm,torch_memory_saver", TMS_INIT_ENABLE="1"
    )
    assert done.stdout == f"{{('default', None): {30 << 20}}} 30\n", done


@pytest.mark.parametrize("retains", ["", "0", "1"])
def test_the_environment_says_whether_copies_stay(machine: Machine, retains: str) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        """\
from torch_memory_saver import torch_memory_saver as saver
with saver.region("kept", enable_cpu_backup=True):
    kept = allocate(30 * MIB)
write(kept, b"kept")
saver.pause()
saver.resume()
print(saver.retain_cpu_backup, [seen["host_bytes"] // MIB for seen in lowtide.regions()])
""",
        TMS_RETAIN_CPU_BACKUP=retains,
    )
    assert printed == ("True [30]\n" if retains == "1" else "False [0]\n")


def test_a_region_that_is_a_process_has_its_cache_back(machine: Machine) -> None:
    printed = machine.code(
        ALIAS,
        MEMORY,
        THREADS,
        """
        from torch_memory_saver import torch_memory_saver as saver
        kept, freed = allocate(30 * MIB), allocate(40 * MIB)
        check(library().lowtide_deallocate(freed))
        saver.pause()
        print([seen["mapped_bytes"] // MIB for seen in lowtide.regions()])
        saver.resume()
        print([seen["mapped_bytes"] // MIB for seen in lowtide.regions()], live())
        """,
        TMS_INIT_ENABLE="1",
    )
    assert printed.splitlines() == ["[0]", f"[70] {{('default', None): {30 << 20}}}"]


def test_children_that_are_configured_have_it_too(machine: Machine) -> None:
    machine.write("child.py", CHILD)
    printed = machine.code(
        ALIAS,
        """
        import os, subprocess, sys
        import torch_memory_saver
        before = dict(os.environ)
        os.environ["LD_PRELOAD"] = kept = os.environ.get("LD_PRELOAD", "")
        with torch_memory_saver.configure_subprocess():
            assert os.environ["LD_PRELOAD"].split(":")[0].endswith("liblowtide.so")
            subprocess.run([sys.executable, "child.py"], check=True)
        assert os.environ == {**before, "LD_PRELOAD": kept}
        done = subprocess.run([sys.executable, "child.py"], capture_output=True, text=True)
        print(done.stderr.splitlines()[-1])
        """,
    )
    assert printed.splitlines() == [
        "lowtide.compat.torch_memory_saver True",
        "ModuleNotFoundError: No module named 'torch_memory_saver'",
    ]


def test_children_that_are_configured_have_cuda_s_runtime(machine: Machine, driver_directory: Path) -> None:
    # A copy of the stand-in driver stands in for the runtime: the driver itself would have the name of the first.
    runtime = shutil.copy(driver_directory / "libcuda.so.1", machine.directory / "libcudart.so.13")
    printed = machine.code(
        ALIAS,
        """
        import os, subprocess, sys
        import torch_memory_saver
        look = "import ctypes; ctypes.CDLL(None).cuMemHostAlloc; ctypes.CDLL(None).tms_pause"
        assert subprocess.run([sys.executable, "-c", look], capture_output=True).returncode == 1
        with torch_memory_saver.configure_subprocess():
            print(os.environ["LD_PRELOAD"].split(":")[1])
            subprocess.run([sys.executable, "-c", look], check=True)
        """,
        LD_LIBRARY_PATH=f"{machine.environment['LD_LIBRARY_PATH']}:{machine.directory}",
    )
    assert printed == f"{runtime}\n"


def test_an_unmodified_program_has_it_by_a_variable(machine: Machine) -> None:
    machine.write("child.py", CHILD)
    done = machine.run("-m", "lowtide", "run", "child.py", LOWTIDE_COMPAT="torch_memory_saver,vllm")
    assert done.stdout == "lowtide.compat.torch_memory_saver True\n", done
    done = machine.run("-m", "lowtide", "run", "child.py", LOWTIDE_COMPAT="tms")
    assert done.returncode == 2
    assert done.stderr == (
        "lowtide: LOWTIDE_COMPAT names 'tms', of which lowtide has no counterpart: it has torch_memory_saver, vllm\n"
    )


def test_what_other_libraries_take_is_in_regions_of_a_program_that_is_preloaded(machine: Machine) -> None:
    machine.write("regions.py", MEMORY)
    machine.write(
        "script.py",
        """
        from regions import *
        driver = ctypes.CDLL("libcuda.so.1")
        context, memory = ctypes.c_void_p(), ctypes.c_uint64()
        assert driver.cuInit(0) == 0 and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert driver.cuCtxSetCurrent(context) == 0

        def take(size):
            assert driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(size)) == 0

        take(10 * MIB)
        import torch
        from torch_memory_saver import torch_memory_saver as saver
        take(20 * MIB)
        with saver.region("other"):
            take(40 * MIB)
        print(torch.cuda.memory.current is not None, saver.__class__.__module__, live())
        """,
    )
    preload = ("-m", "lowtide", "run", "--preload")
    done = machine.run(
        *(*preload, sys.executable, "script.py"), LOWTIDE_COMPAT="torch_memory_saver", TMS_INIT_ENABLE="1"
    )
    regions = {("default", None): 30 << 20, ("other", None): 40 << 20}
    assert done.stdout == f"True lowtide.compat.torch_memory_saver.entrypoint {regions}\n", done
    refusal = machine.refusal(*preload[2:], "true", LOWTIDE_COMPAT="nonsense")
    assert refusal.startswith("LOWTIDE_COMPAT names 'nonsense', of which")
