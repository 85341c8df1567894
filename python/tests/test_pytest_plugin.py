"""The plugin for pytest, with a PyTorch that only counts."""

from pathlib import Path

import pytest
from machine import Machine

from lowtide.pytest_plugin import to_bytes

# What the plugin calls. `held` is what the tensors of each device hold.
TORCH = """
    import shutil
    from types import SimpleNamespace

    held, most, calls = [0, 0], [0, 0], []
    initialised = []

    def hold(size, device=0):
        held[device] += size
        most[device] = max(most[device], held[device])

    def reset_peak_memory_stats(device):
        if not initialised:
            raise RuntimeError("Invalid device argument")
        most[device] = held[device]

    cuda = SimpleNamespace(
        is_available=lambda: True,
        init=lambda: initialised.append(True),
        device_count=lambda: 2,
        reset_peak_memory_stats=reset_peak_memory_stats,
        memory_allocated=lambda device: held[device],
        max_memory_allocated=lambda device: most[device],
        memory=SimpleNamespace(
            _record_memory_history=lambda *a, **k: calls.append("on" if k else "off"),
            _dump_snapshot=lambda path: shutil.copy("snapshot.pickle", path),
        ),
    )
"""

TESTS = """
    import pytest
    import torch

    def test_before():
        torch.hold(5 << 30)

    @pytest.mark.limit_gpu_memory("2 GiB")
    def test_within():
        torch.hold(1 << 30)
        torch.hold(-1 << 30)

    @pytest.mark.limit_gpu_memory("2 GiB")
    def test_above():
        torch.hold(3 << 30, device=1)
        torch.hold(-3 << 30, device=1)

    @pytest.mark.limit_gpu_memory("2 GiB")
    def test_wrong():
        assert False, "its own error"

    @pytest.mark.limit_gpu_memory("2 GiB")
    def test_skips():
        pytest.skip("no need")

    @pytest.mark.limit_gpu_memory("2 GiB")
    def test_xfails():
        pytest.xfail("as expected")

    def test_calls():
        print("calls:", *torch.calls)
"""

LEAK = Path(__file__).parents[2] / "crates/cli/tests/data/leak.pyenv.pickle.gz"


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1000, 1000), ("2 GiB", 2 << 30), ("2G", 2 << 30), ("2GB", 2 * 10**9), ("1.5 MiB", 3 << 19), ("7 B", 7)],
)
def test_sizes(size: object, expected: int) -> None:
    assert to_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "2 XB", "-1", None, "GiB", "2 gib"])
def test_what_is_no_size_is_refused(size: object) -> None:
    with pytest.raises(pytest.UsageError, match="takes a size such as"):
        to_bytes(size)


@pytest.fixture
def project(machine: Machine) -> Machine:
    machine.write("torch.py", TORCH)
    machine.write("test_it.py", TESTS)
    (machine.directory / "snapshot.pickle").write_bytes(LEAK.read_bytes())
    return machine


def test_a_test_above_its_limit_fails(project: Machine) -> None:
    done = project.run("-m", "pytest", "-rP", "-p", "no:cacheprovider", "test_it.py")
    assert done.returncode == 1, done
    assert "2 failed, 3 passed, 1 skipped, 1 xfailed" in done.stdout, done.stdout
    assert "calls:\n" in done.stdout, "nothing is recorded"
    assert "the test held 3.00 GiB on device 1 at once, more than the 2.00 GiB allowed" in done.stdout
    assert "its own error" in done.stdout
    listed = project.run("-m", "pytest", "--markers").stdout
    assert '@pytest.mark.limit_gpu_memory("2 GiB")' in listed


def test_a_report_is_left_where_one_fails(project: Machine) -> None:
    done = project.run("-m", "pytest", "-rP", "-p", "no:cacheprovider", "--lowtide-report=reports", "test_it.py")
    assert "2 failed, 3 passed, 1 skipped, 1 xfailed" in done.stdout, done.stdout
    assert f"calls: {' '.join(['on off'] * 5)}\n" in done.stdout, done.stdout
    assert done.stdout.count("the call sites that hold most of it:") == 2
    names = sorted(path.name for path in (project.directory / "reports").iterdir())
    expected = [f"test_it.py_{test}.{end}" for test in ("test_above", "test_wrong") for end in ("html", "pickle")]
    assert names == expected


def test_a_wrong_marker_and_no_gpu(project: Machine) -> None:
    marked = "@pytest.mark.limit_gpu_memory({})\ndef test_it(): torch.hold(9)\n"
    project.write("test_it.py", "import pytest, torch\n" + marked.format('"much"'))
    done = project.run("-m", "pytest", "-p", "no:cacheprovider", "test_it.py")
    assert "limit_gpu_memory takes a size such as \"2 GiB\", not 'much'" in done.stdout
    project.write("test_it.py", "import pytest, torch\ntorch.cuda.is_available = lambda: False\n" + marked.format("1"))
    assert project.run("-m", "pytest", "-p", "no:cacheprovider", "test_it.py").returncode == 0


def test_what_is_wrong_with_a_report_is_no_failure_of_the_test(project: Machine) -> None:
    (project.directory / "snapshot.pickle").unlink()
    done = project.run("-m", "pytest", "-p", "no:cacheprovider", "--lowtide-report=reports", "test_it.py")
    assert "2 failed, 3 passed, 1 skipped, 1 xfailed" in done.stdout, done.stdout
    assert done.stdout.count("there is no report: ") == 2
    assert "its own error" in done.stdout
