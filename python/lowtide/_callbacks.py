"""What the callbacks for Hugging Face's `Trainer` and for Lightning share."""

import atexit
import functools
import json
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec

from ._errors import Error, first_line, report_line
from ._files import make_directory, write
from ._install import is_installed
from ._library import check, library
from ._memory import memory_stats
from ._record import Recording, record
from ._report import run_command

_P = ParamSpec("_P")

_EVENTS_MAX = 10_000_000
"""More events of PyTorch's own allocator are not kept: the first of them are dropped."""


def harmless(hook: Callable[_P, None]) -> Callable[_P, None]:
    """Returns a hook whose errors never reach the training. Its first error is printed."""
    has_failed = False

    @functools.wraps(hook)
    def call(*arguments: _P.args, **named: _P.kwargs) -> None:
        nonlocal has_failed
        try:
            hook(*arguments, **named)
        except Exception as error:
            if not has_failed:
                report_line(f"the training goes on, but its memory is not recorded or logged: {first_line(error)}")
            has_failed = True

    return call


class TrainingMemory:
    """The figures of a training's memory, and the recording of some of its steps."""

    def __init__(self, record_steps: range | None, path: str | os.PathLike[str] | None) -> None:
        if record_steps is not None and (not isinstance(record_steps, range) or record_steps.step != 1):
            raise ValueError(f"record_steps is a range of steps, such as range(10, 13), not {record_steps!r}")
        self._steps = record_steps or range(0)
        self._given_path = path
        self._path = Path()
        self._recording: Recording | _History | None = None
        self._recorded: Path | None = None

    def begin(self, directory: str | os.PathLike[str], rank: int, ranks: int) -> None:
        """Begins a training. The recording goes to `directory` if no path was given for it."""
        # A training before this one may have raised.
        self.end()
        self._recorded = None
        name = "memory.lowtide" if is_installed() else "memory.pickle"
        path = Path(directory, name) if self._given_path is None else Path(self._given_path)
        self._path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if ranks > 1 else path
        take_peaks()

    def begin_step(self, step: int) -> None:
        """Starts the recording if this step, counted from 0, is to be recorded."""
        if self._recording is None and step in self._steps:
            self._recording = _record(self._path)
            # `Trainer` has no hook for exceptions.
            atexit.register(self.end)

    def end_step(self, done: int) -> None:
        """Ends the recording if the last of its steps is done. `done` is the number of steps that are done."""
        if done >= self._steps.stop:
            self.end()

    @harmless
    def end(self) -> None:
        """Ends the recording, if there is one, and leaves its file."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        atexit.unregister(self.end)
        has_file = recording.is_active
        recording.stop()
        if has_file:
            self._recorded = self._path
            report_line(f"recorded {self._path}")

    def categories(self) -> dict[str, float]:
        """Returns the categories of a recording once, after its end."""
        recorded, self._recorded = self._recorded, None
        return {} if recorded is None else _categories(recorded)


class _History:
    """A recording of PyTorch's own allocator. A history that the program records already goes on as it is."""

    is_active = True

    def __init__(self, path: Path) -> None:
        import torch

        self._path = path
        self._is_written = False
        this = weakref.ref(self)

        def observe(*_: int) -> None:
            # PyTorch keeps an observer for good.
            history = this()
            if history is not None:
                history.write_once()

        # `atexit` would be late in a notebook, which goes on after an out-of-memory error.
        torch._C._cuda_attach_out_of_memory_observer(observe)
        self._is_own = not torch._C._cuda_isHistoryEnabled()
        if self._is_own:
            # Functions of C++ would be looked up at the end, while other ranks wait.
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_EVENTS_MAX)

    def write(self) -> None:
        """Writes the file with all events so far."""
        import torch

        self._is_written = True
        write(self._path, pickle.dumps(torch.cuda.memory._snapshot()))

    @harmless
    def write_once(self) -> None:
        """Writes the file if it is not written yet."""
        if not self._is_written:
            self.write()

    def stop(self) -> None:
        """Ends the recording and writes its file."""
        import torch

        try:
            self.write()
        finally:
            if self._is_own:
                torch.cuda.memory._record_memory_history(None)


def _record(path: Path) -> Recording | _History:
    """Starts a recording by the allocator that PyTorch has."""
    import torch

    make_directory(path.parent)
    if is_installed():
        # Stacks need Python 3.11.
        return record(path, stacks=sys.version_info >= (3, 11))
    if not torch.cuda.is_initialized():
        raise Error("this process uses no GPU")
    return _History(path)


def take_peaks() -> dict[str, float]:
    """Returns the peaks since the last call, of the device that reserved most. Starts the peaks of all devices anew."""
    import torch

    if not torch.cuda.is_initialized():
        return {}
    if is_installed():
        # Without the shim, PyTorch does not have these statistics.
        stats_of, reset = memory_stats, _reset_peaks
    else:
        stats_of, reset = torch.cuda.memory_stats, torch.cuda.reset_peak_memory_stats
    devices = range(torch.cuda.device_count())
    stats: Mapping[str, int] = max(map(stats_of, devices), key=lambda stats: stats["reserved_bytes.all.peak"])
    for device in devices:
        reset(device)
    allocated, reserved, live = (stats[f"{name}_bytes.all.peak"] for name in ("allocated", "reserved", "requested"))
    return {
        "memory/peak_allocated_gib": _gib(allocated),
        "memory/peak_reserved_gib": _gib(reserved),
        "memory/fragmentation_percent": round(100 * (reserved - live) / max(reserved, 1), 2),
    }


def _reset_peaks(device: int) -> None:
    check(library().lowtide_reset_peak_stats(device))


def _categories(recording: Path) -> dict[str, float]:
    """Returns what each category holds at the peak of a recording, on the device that holds most."""
    devices = json.loads(run_command("summary", "--json", str(recording)))
    fullest = max(devices, key=lambda device: device["peak_live"]["live_bytes"])
    # Without stacks there are none.
    categories = fullest["categories"] or {}
    return {f"memory/categories/{name}_gib": _gib(held["bytes"]) for name, held in categories.items()}


def _gib(count: int) -> float:
    """Returns bytes in GiB, to a tenth of a MiB: the trainers print them."""
    return round(count / (1 << 30), 4)
