"""`lowtide run`: a script cannot tell it from Python, but for its allocator."""

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import dedent

import pytest
from machine import Machine

import lowtide._run
from lowtide._library import PATH
from lowtide._report import find_command
from lowtide._run import interpreter_options, preload_list

# What a script can see of how it was started.
LOOK = """
    import __main__, sys
    print(__name__, __file__, __spec__ and __spec__.origin, sys.argv, sys.path, sys.orig_argv, sorted(vars(__main__)))
    print(sys.flags)
"""

# What allocator a process has.
ALLOCATOR = """
    def allocator():
        import torch
        return "PyTorch" if torch.cuda.memory.current is None else "lowtide"
"""


def check_as_python(machine: Machine, *arguments: str, options: tuple[str, ...] = ()) -> None:
    """Runs something with and without lowtide, and compares everything that can be seen of it."""
    plain = machine.run(*options, *arguments)
    ours = machine.run(*options, "-m", "lowtide", "run", *arguments)
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_a_script_sees_what_python_shows_it(machine: Machine) -> None:
    machine.write("deep/script.py", LOOK)
    check_as_python(machine, "deep/script.py", "a", "--strategy", "-m", "--help")
    check_as_python(machine, "deep/script.py", options=("-u", "-X", "dev", "-W", "error", "-OO"))
    machine.write("package/__main__.py", LOOK)
    check_as_python(machine, "package", "a")
    machine.write("package/__init__.py", "")
    check_as_python(machine, "-m", "package", "a")
    check_as_python(machine, "-m", "package.__main__", "-m", "b")
    check_as_python(machine, "-mpackage")
    check_as_python(machine, "-c", "import sys; print(sys.argv, sys.path)", "a")
    check_as_python(machine, "-")


@pytest.mark.parametrize(
    "body",
    [
        "raise SystemExit",
        "raise SystemExit(3)",
        "raise SystemExit('a message')",
        "def fail():\n    raise ValueError('deep')\nfail()",
        "import no_such_module",
        "a syntax error",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import atexit; atexit.register(print, __name__); raise KeyboardInterrupt",
        "import os; os._exit(7)",
    ],
)
def test_a_script_ends_as_in_python(machine: Machine, body: str) -> None:
    machine.write("script.py", body)
    check_as_python(machine, "script.py")


def test_a_script_that_is_not_there_is_pythons_to_tell(machine: Machine) -> None:
    check_as_python(machine, "no_such_script.py")
    check_as_python(machine, "-m", "no_such_module")


@pytest.mark.parametrize(
    ("original", "options"),
    [
        (["python", "-m", "lowtide", "run"], []),
        (["python", "-mlowtide", "run"], []),
        (["python", "-um", "lowtide", "run"], ["-u"]),
        (["python", "-umlowtide", "run"], ["-u"]),
        (["python", "-u", "-X", "dev", "-m", "lowtide", "run"], ["-u", "-X", "dev"]),
    ],
)
def test_options_of_the_interpreter_are_found(original: list[str], options: list[str]) -> None:
    assert interpreter_options([*original, "-m", "lowtide"], 4) == options


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "no script given"),
        (["--strategy"], "`--strategy` takes a value"),
        (["--strategie", "bfc", "s.py"], "unknown option `--strategie`"),
        (["-u", "s.py"], "unknown option `-u`; Python's own come before `-m lowtide`"),
        (["--strategy", "best", "s.py"], "Unknown strategy 'best', options are direct"),
        (["--strategy=bfc:x:1", "s.py"], "Unrecognized key 'x'"),
        (["--config=x:1", "s.py"], "Unrecognized key 'x'"),
        (["--strategy", "bfc:x:1", "--config", "x:2", "s.py"], "the options are given twice"),
    ],
)
def test_each_bad_argument_has_its_line(machine: Machine, arguments: list[str], expected: str) -> None:
    assert machine.refusal("run", *arguments).startswith(expected)


def test_commands(machine: Machine) -> None:
    assert machine.refusal("ran").startswith("unrecognized subcommand 'ran'")
    for arguments in ([], ["--help"], ["run", "--help"], ["run", "--preload", "-h"], ["build", "-h"]):
        done = machine.run("-m", "lowtide", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert "Usage: lowtide" in done.stdout


def test_pytorch_loads_lowtide_if_the_environment_says_so(machine: Machine) -> None:
    (found,) = entry_points(group="torch.backends", name="lowtide")
    assert found.value == "lowtide._autoload:load"
    machine.write("look.py", ALLOCATOR + "    from lowtide._autoload import load\n    load()\n    print(allocator())\n")
    for wish, expected in (("1", "lowtide"), ("0", "PyTorch"), ("", "PyTorch")):
        assert machine.run("look.py", LOWTIDE=wish).stdout == f"{expected}\n"
    # Under `run`, lowtide is installed by that.
    done = machine.run("-m", "lowtide", "run", "look.py", LOWTIDE="1")
    assert (done.stdout, done.stderr.count("shim")) == ("lowtide\n", 1)
    done = machine.run("look.py", LOWTIDE="1", LOWTIDE_STRATEGY="best")
    assert done.returncode == 2
    assert done.stderr.startswith("lowtide: Unknown strategy 'best'")


def test_the_program_serves_the_other_commands(machine: Machine) -> None:
    program = find_command()
    for arguments in (["replay", "--help"], ["leaks", "no.pickle"], ["--version"]):
        ours = machine.run("-m", "lowtide", *arguments)
        theirs = machine.command(program, *arguments)
        assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)
    done = machine.run("-c", "import lowtide; print(lowtide.__version__, hasattr(lowtide, 'none'))")
    assert done.stdout == f"{lowtide.version()} False\n"


def test_the_program_runs_scripts(machine: Machine) -> None:
    program = find_command()
    machine.write("look.py", LOOK)
    by_package = machine.run("-m", "lowtide", "run", "look.py", "a")
    by_program = machine.command(program, "run", "look.py", "a")
    assert by_program.stdout == by_package.stdout
    machine.write("choice.py", "import os; print(os.environ.get('LOWTIDE_STRATEGY'), os.environ.get('LOWTIDE_CONF'))")
    options = ("--strategy", "caching", "--config", "expandable_segments:True")
    done = machine.command(program, "run", *options, "choice.py")
    assert done.stdout == "caching expandable_segments:True\n"
    assert machine.command(program, "run", "-c", "raise SystemExit(7)").returncode == 7


def test_every_python_of_a_command_has_lowtide(machine: Machine) -> None:
    machine.write("look.py", ALLOCATOR + "    print(allocator())\n")
    launcher = machine.write("launch", f"#!{sys.executable}\n" + dedent(ALLOCATOR) + "print(allocator())\n")
    launcher.chmod(0o755)
    shell = machine.write("all.sh", f"#!/bin/sh\n{sys.executable} look.py\n")
    shell.chmod(0o755)
    for command in ([sys.executable, "look.py"], ["./launch"], ["./all.sh"], ["sh", "all.sh"]):
        assert machine.run("-m", "lowtide", "run", *command).stdout == "lowtide\n", command


def test_that_lowtide_is_active_is_said_once(machine: Machine) -> None:
    machine.write("parent.py", "import subprocess, sys, torch; subprocess.run([sys.executable, '-c', 'import torch'])")
    done = machine.run("-m", "lowtide", "run", "--strategy", "bfc", "parent.py")
    assert done.stderr.count("lowtide: active, with the strategy bfc\n") == 1


def test_options_of_python_that_would_lose_children_are_refused(gpu: Machine) -> None:
    for option in ("-I", "-E", "-S"):
        variables = {"PYTHONPATH": str(Path(sys.prefix, *SITE))} if option == "-S" else {}
        done = gpu.run(option, "-m", "lowtide", "run", "script.py", **variables)
        assert done.returncode == 2
        assert done.stderr.startswith("lowtide: `run` does not work with Python's options -E, -I and -S")


SITE = ("lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")


def test_pytorch_is_served_as_soon_as_it_is_imported(machine: Machine) -> None:
    machine.write(
        "script.py",
        """
        import sys
        assert "torch" not in sys.modules and "lowtide._memory" in sys.modules
        import torch
        print(torch.cuda.memory.current.allocate.__name__)
        import lowtide
        lowtide.install()
        lowtide.memory_stats()
        try:
            lowtide.install("bfc")
        except lowtide.StartedError:
            print("started")
        """,
    )
    done = machine.run("-m", "lowtide", "run", "script.py")
    assert done.stdout == "lowtide_malloc\nstarted\n", done


@pytest.mark.parametrize(
    ("arguments", "variables", "config"),
    [
        ([], {}, "tide"),
        (["--strategy", "direct"], {}, "direct"),
        ([], {"LOWTIDE_STRATEGY": "direct"}, "direct"),
        (["--strategy", "buddy"], {"LOWTIDE_STRATEGY": "bfc", "LOWTIDE_CONF": "retry_ms:7"}, "buddy"),
        (["--strategy", "caching:expandable_segments:True"], {}, "caching:expandable_segments:True"),
        (["--config", "expandable_segments:True"], {}, "caching:expandable_segments:True"),
        ([], {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "tide"),
        (
            ["--strategy", "caching"],
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "caching:expandable_segments:True",
        ),
        (
            ["--config=expandable_segments:False"],
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            "caching",
        ),
    ],
)
def test_the_choice_reaches_the_script(
    machine: Machine, arguments: list[str], variables: dict[str, str], config: str
) -> None:
    machine.write(
        "script.py",
        """
        import torch
        from lowtide._library import library
        torch.cuda.memory.current.allocate(1000, 0, None)
        print(library().lowtide_config().decode())
        """,
    )
    done = machine.run("-m", "lowtide", "run", *arguments, "script.py", **variables)
    assert done.stdout == f"{config}\n", done


def test_what_tide_does_not_read_is_said_once(machine: Machine) -> None:
    line = "lowtide: tide has no options and does not read PYTORCH_ALLOC_CONF; LOWTIDE_STRATEGY=caching does\n"
    conf = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    machine.write("script.py", "import torch, lowtide; lowtide.install()")
    for command in (["-m", "lowtide", "run", "script.py"], ["script.py"]):
        done = machine.run(*command, **conf)
        assert done.stderr.count(line) == 1, done
    for choice in ({"LOWTIDE_STRATEGY": "caching"}, {"LOWTIDE_CONF": "expandable_segments:True"}):
        assert line not in machine.run("-m", "lowtide", "run", "script.py", **conf, **choice).stderr


def test_a_script_may_choose_before_it_imports_pytorch(machine: Machine) -> None:
    machine.write(
        "script.py",
        """
        import lowtide
        lowtide.install("direct")
        import torch
        torch.cuda.memory.current.allocate(1000, 0, None)
        (segment,) = lowtide.snapshot()["segments"]
        print(segment["total_size"])
        """,
    )
    done = machine.run("-m", "lowtide", "run", "script.py")
    assert done.stdout == "1024\n", done


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children_of_multiprocessing_have_it(machine: Machine, method: str) -> None:
    machine.write("children.py", ALLOCATOR)
    machine.write(
        "script.py",
        f"""
        import multiprocessing
        from children import allocator

        def work(_):
            return allocator()

        if __name__ == "__main__":
            with multiprocessing.get_context("{method}").Pool(2) as pool:
                print(*set(pool.map(work, range(4))))
        """,
    )
    done = machine.run("-m", "lowtide", "run", "script.py")
    assert done.stdout == "lowtide\n", done


def test_programs_that_a_script_starts_have_it(machine: Machine) -> None:
    machine.write("child.py", ALLOCATOR + "\n    print(allocator())")
    machine.write(
        "script.py",
        """
        import subprocess, sys
        subprocess.run([sys.executable, "child.py"], check=True)
        subprocess.run("exec " + sys.executable + " child.py", shell=True, check=True)
        """,
    )
    done = machine.run("-m", "lowtide", "run", "script.py")
    assert done.stdout == "lowtide\n" * 2, done
    # Whoever cuts the environment off, as the workers of torch.compile do, has PyTorch's own.
    machine.write(
        "script.py",
        """
        import os, subprocess, sys
        path = os.pathsep.join(sys.path)
        subprocess.run([sys.executable, "child.py"], env={**os.environ, "PYTHONPATH": path}, check=True)
        """,
    )
    done = machine.run("-m", "lowtide", "run", "script.py")
    assert done.stdout == "PyTorch\n", done


def test_a_sitecustomize_that_is_there_is_run_too(machine: Machine) -> None:
    machine.write("site/sitecustomize.py", "import sys\nprint('theirs', 'torch' in sys.modules)")
    machine.write("script.py", "import sitecustomize, torch\nprint(sitecustomize.__file__)")
    path = os.pathsep.join([str(machine.directory / "site"), machine.environment["PYTHONPATH"]])
    done = machine.run("-m", "lowtide", "run", "script.py", PYTHONPATH=path)
    assert "theirs False" in done.stdout, done
    assert "site/sitecustomize.py" in done.stdout, done
    assert "Error" not in done.stderr, done


def test_an_import_that_fails_may_be_tried_again(machine: Machine) -> None:
    machine.write(
        "script.py",
        """
        import sys, types
        sys.modules["torch.cuda"] = None
        try:
            import torch
        except ImportError:
            print("failed")
        del sys.modules["torch.cuda"]
        import torch
        print(torch.cuda.memory.current is not None, torch.__spec__.name, torch.__loader__)
        """,
    )
    done = machine.run("-m", "lowtide", "run", "script.py")
    lines = done.stdout.splitlines()
    assert lines[0] == "failed", done
    assert lines[1].startswith("True torch <_frozen_importlib_external.SourceFileLoader"), done


def test_finders_and_loaders_of_others_are_passed_over(machine: Machine) -> None:
    machine.write(
        "script.py",
        """
        import importlib.util, sys
        class Old:
            def find_module(self, name, path=None):
                return None
        sys.meta_path.insert(0, Old())
        early = importlib.util.find_spec("torch")
        import torch
        print(torch.cuda.memory.current is not None)
        early.loader.exec_module(importlib.util.module_from_spec(early))
        """,
    )
    done = machine.run("-m", "lowtide", "run", "script.py")
    assert (done.returncode, done.stdout) == (0, "True\n"), done


def test_a_program_of_another_environment_keeps_its_pytorch(machine: Machine) -> None:
    machine.write("other.py", ALLOCATOR + "\n    print(allocator())")
    machine.write(
        "script.py",
        """
        import os, subprocess, sys, venv
        venv.create("other")
        old = {**os.environ, "FAKE_TORCH_VERSION": "2.5.0"}
        for python in ("other/bin/python", sys.executable):
            print(subprocess.run([python, "other.py"], env=old).returncode, flush=True)
        """,
    )
    done = machine.run("-m", "lowtide", "run", "script.py")
    assert done.stdout == "PyTorch\n0\n2\n", done
    too_old = "lowtide: PyTorch 2.5.0 is too old: lowtide needs 2.6 or newer"
    assert done.stderr.splitlines() == [f"{too_old}: this program runs without lowtide", too_old]


def test_a_program_that_asks_for_another_backend_has_it(machine: Machine) -> None:
    wish = '\n    import os; os.environ["PYTORCH_ALLOC_CONF"] = "backend:cudaMallocAsync"'
    machine.write("script.py", wish + ALLOCATOR + "\n    print(allocator())")
    done = machine.run("-m", "lowtide", "run", "script.py")
    assert (done.returncode, done.stdout) == (0, "PyTorch\n"), done
    (line,) = done.stderr.splitlines()
    asks = "PYTORCH_ALLOC_CONF asks for backend:cudaMallocAsync, an allocator of its own"
    assert line == f"lowtide: {asks}: this program runs without lowtide"
    # What the user's own environment asks for contradicts the command.
    done = machine.run("-m", "lowtide", "run", "script.py", PYTORCH_ALLOC_CONF="backend:cudaMallocAsync")
    assert (done.returncode, done.stdout) == (2, ""), done


def test_an_older_python_is_left_alone(machine: Machine) -> None:
    machine.write("site/sitecustomize.py", "print('theirs')")
    startup = Path(lowtide._run.__file__).parent / "_startup"
    printed = machine.code(
        f"""
        import runpy, sys
        for name in [name for name in sys.modules if name == "sitecustomize" or name.startswith("lowtide")]:
            del sys.modules[name]
        sys.path[:0] = [{str(startup)!r}, "site"]
        sys.version_info = (3, 9, 0, "final", 0)
        runpy.run_path({str(startup / "sitecustomize.py")!r}, run_name="sitecustomize")
        print("lowtide" in sys.modules, {str(startup)!r} in sys.path)
        """
    )
    assert printed == "theirs\nFalse False\n"


def test_without_a_driver_the_script_runs_without_lowtide(machine: Machine) -> None:
    machine.write("script.py", ALLOCATOR + "\n    print(allocator())")
    done = machine.run("-m", "lowtide", "run", "script.py", LD_LIBRARY_PATH="")
    assert done.stdout == "PyTorch\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("lowtide: NVIDIA's driver cannot be loaded: libcuda.so.1")
    assert line.endswith(": the script runs without lowtide")


@pytest.mark.parametrize("variables", [{}, {"FAKE_TORCH_CUDA": ""}, {"FAKE_TORCH_VERSION": "2.5.0"}])
def test_without_a_driver_packages_have_other_names_all_the_same(machine: Machine, variables: dict[str, str]) -> None:
    script = """
        import torch_memory_saver
        print(torch_memory_saver.__name__)
        try:
            torch_memory_saver.torch_memory_saver.pause()
        except RuntimeError as error:
            print(type(error).__name__)
    """
    machine.write("script.py", script)
    done = machine.run(
        "-m", "lowtide", "run", "script.py", LD_LIBRARY_PATH="", LOWTIDE_COMPAT="torch_memory_saver", **variables
    )
    assert done.stdout.splitlines() == ["lowtide.compat.torch_memory_saver", "NoDriverError"]
    (line,) = done.stderr.splitlines()
    assert line.endswith(": the script runs without lowtide")


def test_a_pytorch_that_is_too_old_ends_the_script(machine: Machine) -> None:
    machine.write("script.py", "import torch\nprint('not reached')")
    done = machine.run("-m", "lowtide", "run", "script.py", FAKE_TORCH_VERSION="2.5.0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "lowtide: PyTorch 2.5.0 is too old: lowtide needs 2.6 or newer\n"


def test_any_program_runs_with_lowtide_in_front_of_the_driver(gpu: Machine) -> None:
    preload = ("-m", "lowtide", "run", "--preload")
    look = "import os; print(os.environ['LD_PRELOAD'].split(':')[0], os.environ['LOWTIDE_PRELOAD'])"
    own = "libdl.so.2"
    done = gpu.run(*preload, sys.executable, "-c", look, LD_PRELOAD=own)
    assert (done.returncode, done.stderr) == (0, "")
    library, marker = done.stdout.split()
    assert (library, marker) == (str(PATH), "1")
    # The driver by its names, as libraries for Python find it.
    gpu.write(
        "loop.py",
        """
        import ctypes, os, sys
        driver = ctypes.CDLL("libcuda.so.1")
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        failed = driver.cuInit(0) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        failed = failed or driver.cuCtxSetCurrent(context)
        for _ in range(100):
            failed = failed or driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 20))
            failed = failed or driver.cuMemFree_v2(address)
        print(failed, driver.fakecuda_calls(b"cuMemAlloc_v2"), os.environ.get("LOWTIDE_STRATEGY"))
        sys.exit(3)
        """,
    )
    done = gpu.run(*preload, "--strategy", "buddy", "--", sys.executable, "loop.py")
    assert (done.returncode, done.stdout) == (3, "0 1 buddy\n")
    assert done.stderr.startswith("lowtide: 200 calls for memory, 1 made to the driver\n")
    plain = gpu.run("loop.py")
    assert (plain.stdout, plain.stderr) == ("0 100 None\n", "")


def test_a_program_that_cannot_be_preloaded_is_told(bare: Machine) -> None:
    preload = ("run", "--preload")
    for nothing in ((), ("",)):
        assert bare.refusal(*preload, *nothing) == "no program given; `lowtide run --help` has the usage"
    assert bare.refusal(*preload, "true", LOWTIDE_CONF="foo:1").endswith(
        "'foo' in CUDA allocator config. (LOWTIDE_CONF)"
    )
    assert "'best'" in bare.refusal(*preload, "--strategy", "best", "true")
    assert "given twice" in bare.refusal(*preload, "--strategy", "bfc:", "--config", "", "true")
    done = bare.run("-m", "lowtide", *preload, "no-such-program")
    assert (done.returncode, done.stderr) == (127, "lowtide: no-such-program: No such file or directory\n")
    done = bare.run("-m", "lowtide", *preload, "sh", "-c", "exit 5")
    assert (done.returncode, done.stderr) == (5, "")
    # PyTorch keeps its own allocator there.
    done = bare.run("-m", "lowtide", *preload, "true", PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_users_own_libraries_are_preloaded_too() -> None:
    assert preload_list("/opt/liblowtide.so", None) == "/opt/liblowtide.so"
    assert preload_list("/opt/liblowtide.so", "/a.so /b.so") == "/opt/liblowtide.so:/a.so /b.so"
    with pytest.raises(lowtide.Error, match="no path with a space"):
        preload_list("/my opt/liblowtide.so", None)
