"""A plugin for pytest: limits for the GPU memory of tests.

    @pytest.mark.limit_gpu_memory("2 GiB")
    def test_step():
        ...

The test fails if PyTorch's tensors hold more GPU memory at once, on any device, than before the test and this limit
together. It needs PyTorch and a GPU, but not lowtide as the allocator. Without a GPU, the limit is not checked.

With `pytest --lowtide-report=DIR`, the memory events of these tests are recorded. A test that fails leaves a snapshot
and the page of `lowtide report` there, and its failure shows the `lowtide summary`.
"""

import hashlib
import re
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from ._errors import first_line
from ._files import make_directory
from ._report import find_command

MARKER = "limit_gpu_memory"

_EVENTS_MAX = 1_000_000
"""More events of one test are not kept: the first of them are dropped."""

_FAILURES = (Exception, pytest.fail.Exception)
_NO_FAILURES = (pytest.skip.Exception, pytest.xfail.Exception)

_NAME_MAX = 100
"""The most characters of a test's name in the names of its files."""

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("iB", 1024), ("", 1024))
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option for reports."""
    text = "record the GPU memory of tests that limit it, and write a report to DIR for each that fails"
    parser.getgroup("lowtide").addoption("--lowtide-report", metavar="DIR", type=Path, help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Explains the marker to `pytest --markers`."""
    text = "fail the test if tensors hold more GPU memory at once; lowtide checks it"
    config.addinivalue_line("markers", f'{MARKER}("2 GiB"): {text}')


def to_bytes(size: object) -> int:
    """Returns the bytes of a size: `1048576`, `"2 GiB"`, `"512M"` (powers of 1024) or `"2 GB"` (powers of 1000).

    Raises `pytest.UsageError` for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    factor = None if match is None else _UNITS.get(match[2])
    if match is None or factor is None:
        raise pytest.UsageError(f'{MARKER} takes a size such as "2 GiB", not {size!r}')
    return int(float(match[1]) * factor)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Runs a test and fails it if it exceeds its limit."""
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return (yield)
    if len(marker.args) != 1 or marker.kwargs:
        raise pytest.UsageError(f'{MARKER} takes one size, such as "2 GiB"')
    limit = to_bytes(marker.args[0])
    import torch

    if not torch.cuda.is_available():
        return (yield)
    directory: Path | None = item.config.getoption("--lowtide-report")
    before = _begin(torch, directory is not None)
    try:
        result = yield
        _check(torch, before, limit)
    except _FAILURES as error:
        if directory is not None and not isinstance(error, _NO_FAILURES):
            item.add_report_section("call", "lowtide", _report_text(torch, directory, item))
        raise
    finally:
        if directory is not None:
            torch.cuda.memory._record_memory_history(None)
    return result


def _begin(torch: Any, records: bool) -> list[int]:
    """Starts the measurement, and returns the bytes that tensors hold on each device."""
    # Statistics cannot be reset before.
    torch.cuda.init()
    if records:
        torch.cuda.memory._record_memory_history(max_entries=_EVENTS_MAX)
    devices = range(torch.cuda.device_count())
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    return [torch.cuda.memory_allocated(device) for device in devices]


def _check(torch: Any, before: list[int], limit: int) -> None:
    for device, held in enumerate(before):
        most = torch.cuda.max_memory_allocated(device) - held
        if most > limit:
            what = f"the test held {_text(most)} on device {device} at once, more than the {_text(limit)} allowed"
            pytest.fail(what, pytrace=False)


def _text(size: int) -> str:
    """Returns a size in the largest unit that is not larger."""
    power = min(max(size.bit_length() - 1, 0) // 10, 4)
    return f"{size} bytes" if power == 0 else f"{size / 1024**power:.2f} {'KMGT'[power - 1]}iB"


def _report_text(torch: Any, directory: Path, item: pytest.Item) -> str:
    """Leaves a report, and returns the summary or, as a failed report is no failure of the test, what went wrong."""
    try:
        return _leave_report(torch, directory, item)
    except Exception as error:
        return f"there is no report: {first_line(error)}"


def _leave_report(torch: Any, directory: Path, item: pytest.Item) -> str:
    """Leaves a snapshot and a page for a test. Returns the page's path and the summary."""
    make_directory(directory)
    name = re.sub(r"[^\w.-]+", "_", item.nodeid)
    if len(name) > _NAME_MAX:
        name = f"{name[:_NAME_MAX]}.{hashlib.sha256(item.nodeid.encode()).hexdigest()[:8]}"
    snapshot, page = directory / f"{name}.pickle", directory / f"{name}.html"
    torch.cuda.memory._dump_snapshot(str(snapshot))
    command = find_command()
    subprocess.run([command, "report", snapshot, "-o", page], stdout=subprocess.DEVNULL, check=False)
    made = subprocess.run([command, "summary", snapshot], capture_output=True, text=True, errors="replace", check=False)
    return f"{page}\n{made.stdout or made.stderr}"
