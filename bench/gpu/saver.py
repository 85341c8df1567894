"""How long memory takes to leave a card and to come back: lowtide's regions, or torch_memory_saver's.

    python saver.py lowtide [--scale FRACTION]
    python saver.py tms [--scale FRACTION]

`tms` is the package torch_memory_saver, in both of its hook modes, if it is installed. Each case and mode is a process
of its own, and each of its rounds a JSON line. Before a round every byte is set to noise; while the memory is away
others write over what became free; afterwards every byte is compared, or, where contents are dropped, set and compared.
`--scale` makes the cases smaller, for smaller cards.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ROUNDS = 4
MIB, GIB = 1 << 20, 1 << 30
# Noise is made in parts of this size.
PART = 256 * MIB


@dataclass
class Case:
    """Some tensors of one size."""

    name: str
    count: int
    size: int
    is_kept: bool
    # How long the card works after each pause and each resume, without memory that comes or goes; otherwise others
    # write over what became free.
    work_seconds: float = 0.0


CASES = [
    Case("1 x 32 GiB, dropped", 1, 32 * GIB, False),
    Case("1024 x 32 MiB, dropped", 1024, 32 * MIB, False),
    Case("64 x 128 MiB, host copy", 64, 128 * MIB, True),
    Case("1024 x 32 MiB, dropped, half a second of work between", 1024, 32 * MIB, False, 0.5),
]


@dataclass
class Package:
    """What is measured."""

    region: Callable[[str, bool], Any]
    pause: Callable[[str], None]
    resume: Callable[[str], None]


def lowtide_package() -> Package:
    import lowtide

    lowtide.install()
    # As long as memory comes and goes in turns, a program would.
    lowtide.retain_backups()
    return Package(lambda tag, is_kept: lowtide.region(tag, "host" if is_kept else None), lowtide.pause, lowtide.resume)


def tms_package(mode: str) -> Package:
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver.hook_mode = mode
    torch_memory_saver.retain_cpu_backup = True
    return Package(
        lambda tag, is_kept: torch_memory_saver.region(tag=tag, enable_cpu_backup=is_kept),
        torch_memory_saver.pause,
        torch_memory_saver.resume,
    )


def measure(case: Case, label: str, package: Package) -> None:
    """Prints a line for each round."""
    import torch

    with package.region("measured", case.is_kept):
        tensors = [torch.empty(case.size, dtype=torch.uint8, device="cuda") for _ in range(case.count)]
    for number in range(ROUNDS):
        set_to_noise(tensors, number)
        torch.cuda.empty_cache()
        work(case.work_seconds)
        before = free_bytes()
        pause_ms = milliseconds(lambda: package.pause("measured"))
        freed = free_bytes() - before
        if case.work_seconds:
            work(case.work_seconds)
        else:
            write_over(freed)
        resume_ms = milliseconds(lambda: package.resume("measured"))
        if not case.is_kept:
            set_to_noise(tensors, number)
        is_right = is_noise(tensors, number)
        size = case.count * case.size
        figures: dict[str, object] = {
            "name": case.name,
            "label": label,
            "round": number,
            "pause_ms": round(pause_ms, 3),
            "resume_ms": round(resume_ms, 3),
            "freed_gib": round(freed / GIB, 3),
            "of_gib": round(size / GIB, 3),
            "content": ("kept" if case.is_kept else "dropped") if is_right else "wrong",
        }
        if case.is_kept:
            figures["pause_gb_per_s"] = round(size / pause_ms / 1e6, 2)
            figures["resume_gb_per_s"] = round(size / resume_ms / 1e6, 2)
        print(json.dumps(figures), flush=True)


def milliseconds(act: Callable[[], None]) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def free_bytes() -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0])


def write_over(size: int) -> None:
    """Writes to so much memory, which nobody has then, so that what was there is gone."""
    import torch

    # The card needs some for itself.
    others = [torch.full((PART,), 0xA5, dtype=torch.uint8, device="cuda") for _ in range(int(size * 0.9) // PART)]
    del others
    torch.cuda.empty_cache()


def work(seconds: float) -> None:
    """Multiplies for so long, and waits for it as for every step."""
    import torch

    factor = torch.randn(2048, 2048, device="cuda")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(factor, factor)
        torch.cuda.synchronize()


def parts(tensors: list[Any], number: int) -> Any:
    """Yields each part of the tensors with the noise that is to be there in this round."""
    import torch

    generator = torch.Generator("cuda").manual_seed(number)
    for tensor in tensors:
        for part in tensor.split(PART):
            yield part, torch.randint(0, 256, part.shape, dtype=torch.uint8, device="cuda", generator=generator)


def set_to_noise(tensors: list[Any], number: int) -> None:
    for part, noise in parts(tensors, number):
        part.copy_(noise)


def is_noise(tensors: list[Any], number: int) -> bool:
    import torch

    return all(torch.equal(part, noise) for part, noise in parts(tensors, number))


def main() -> int:
    """Starts a process for each case and mode, or is one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("package", choices=["lowtide", "tms"])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        case = CASES[options.case]
        # Few small tensors are a smaller case of many small ones, and one large is of one larger.
        if case.count == 1:
            case.size = int(case.size * options.scale)
        else:
            case.count = max(1, int(case.count * options.scale))
        package = tms_package(options.mode) if options.mode else lowtide_package()
        measure(case, options.mode or options.package, package)
        sys.stdout.flush()
        # What the package does when its process ends is not measured.
        os._exit(0)
    if options.package == "lowtide":
        modes: list[str | None] = [None]
    elif importlib.util.find_spec("torch_memory_saver") is None:
        reason = "torch_memory_saver is not installed: pip install torch_memory_saver==0.0.10"
        print(json.dumps({"name": "not measured", "reason": reason}))
        return 0
    else:
        modes = ["torch", "preload"]
    failures = [(mode, case) for mode in modes for case in range(len(CASES)) if start(case, mode, options) != 0]
    for mode, case in failures:
        print(f"{mode or options.package}: {CASES[case].name} failed", flush=True)
    return 1 if failures else 0


def start(case: int, mode: str | None, options: argparse.Namespace) -> int:
    """Runs a case in a process of its own and returns its exit code."""
    command = [sys.executable, __file__, options.package, "--scale", str(options.scale), "--case", str(case)]
    if mode is None:
        return subprocess.run(command, check=False).returncode
    command += ["--mode", mode]
    if mode == "torch":
        return subprocess.run(command, check=False).returncode
    import torch_memory_saver

    with torch_memory_saver.configure_subprocess():
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
