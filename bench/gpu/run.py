"""Everything that needs a GPU, one step after the other, and a record of it: `cargo xtask gpu`, or without cargo

    python3 bench/gpu/run.py [--record DIRECTORY] [STEP]...

The steps are `doctor`; `build`, the shim; `tests`, those of `python/tests/gpu`; and the measurements: a program of this
directory, what it is told, and an allocator, like `jobs/gpt2_train/caching`, `latency/pytorch`. STEP is the name of a
step or the beginning of some: `jobs`, `jobs/gpt2_train`. Without STEP it is all of them. A step that fails does not
keep the others from running; at the end the failed ones are named, and the exit code is 1.

The PyTorch is that of this Python. lowtide is the directory `python`, if `python3 python/stage.py` has put the library
there, else what is installed.

A program measures the allocator that PyTorch has, whichever it is: `pytorch` runs it as it is, every other name runs it
by `lowtide run --strategy`. Where the name is missing, as in `saver/tms`, the program's arguments say what it
measures. It prints one JSON object a line for each thing that it measured, `name` and its figures:
`{"name": "1 thread, 1 live", "pair_ns": 71.0}`. Its other lines are for people. It exits with 0 when it could measure,
whatever the figures are, and is killed after half an hour. A new program is a line in `MEASUREMENTS`.

The record is `bench/record/<card>/<date>`: `doctor.json`, `tests.txt`, and for each program a file of those objects, in
each of which `step` is added. Steps that did not run leave theirs there.
"""

import argparse
import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
STEP_SECONDS_MAX = 1800

EVERY_ALLOCATOR = (
    *("pytorch", "caching", "caching:expandable_segments:True", "tide"),
    *("bfc", "buddy", "slab", "pool", "direct"),
)
JOBS = ("mnist_mlp", "gpt2_train", "llama_varlen", "resnet_multiscale", "llama_generate")


@dataclass
class Measurement:
    """One run of a program of this directory."""

    program: str
    arguments: tuple[str, ...] = ()
    # None for a program whose arguments say what it measures.
    allocator: str | None = "pytorch"
    # The program is started once for each card.
    is_distributed: bool = False

    @property
    def step(self) -> str:
        """The name of the step: `jobs/gpt2_train/caching`."""
        words = (argument.lstrip("-") for argument in self.arguments)
        return "/".join([self.program, *words, *([self.allocator] if self.allocator else [])])

    def command(self) -> list[str]:
        """Returns what runs it."""
        launcher = [sys.executable]
        if self.is_distributed:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "gpu"]
        if self.allocator not in (None, "pytorch"):
            launcher += ["-m", "lowtide", "run", "--strategy", str(self.allocator)]
        return [*launcher, str(HERE / f"{self.program}.py"), *self.arguments]


MEASUREMENTS = [
    *(Measurement("latency", (), allocator) for allocator in EVERY_ALLOCATOR),
    *(Measurement("jobs", (job,), allocator) for job in JOBS for allocator in EVERY_ALLOCATOR),
    # The losses of these can be compared bit for bit; their times are not those of other runs.
    *(Measurement("jobs", (job, "--exact"), allocator) for job in JOBS for allocator in EVERY_ALLOCATOR),
    *(Measurement("distributed", (), allocator, True) for allocator in ("pytorch", "caching", "tide")),
    *(Measurement("captures", (), allocator) for allocator in ("pytorch", "caching")),
    *(Measurement("reduce_overhead", (), allocator) for allocator in ("pytorch", "tide")),
    *(Measurement("saver", (package,), None) for package in ("tms", "lowtide")),
    Measurement("malloc_loop", (), None),
]
MEASUREMENT_OF = {measurement.step: measurement for measurement in MEASUREMENTS}
STEPS = ["doctor", "build", "tests", *MEASUREMENT_OF]


def main(arguments: list[str]) -> int:
    """Runs the steps and returns the exit code."""
    parser = argparse.ArgumentParser(description="Runs tests and measurements on a GPU, and records them.")
    parser.add_argument("--record", type=Path, help="where to write the record [bench/record/<card>/<date>]")
    parser.add_argument("--list", action="store_true", help="print the steps and run none")
    parser.add_argument("steps", metavar="STEP", nargs="*", help="the steps to run, or the beginning of some [all]")
    options = parser.parse_args(arguments)
    try:
        steps = chosen(options.steps)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        print(*steps, sep="\n")
        return 0
    environment = package_environment()
    report = examine(environment)
    record = options.record or ROOT / "bench" / "record" / machine(report) / datetime.date.today().isoformat()
    record.mkdir(parents=True, exist_ok=True)
    failed = [step for step in steps if not run(step, report, record, environment)]
    print(f"\nrecord: {record}")
    print(f"failed: {', '.join(failed)}" if failed else "all steps succeeded")
    return 1 if failed else 0


def chosen(names: list[str]) -> list[str]:
    """Returns the steps that these names stand for, in their order, each once; all without a name."""
    found: dict[str, None] = {}
    for name in names or STEPS:
        matching = [step for step in STEPS if step == name or step.startswith(f"{name}/")]
        if not matching:
            raise ValueError(f"unknown step {name!r}; --list has them")
        found |= dict.fromkeys(matching)
    return list(found)


def package_environment() -> dict[str, str]:
    """Returns the environment in which Python finds lowtide."""
    package = ROOT / "python"
    if not (package / "lowtide" / "liblowtide.so").exists():
        if importlib.util.find_spec("lowtide") is None:
            raise SystemExit("lowtide is not there: run `python3 python/stage.py`, or install the wheel")
        return dict(os.environ)
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{path}" if path else str(package)}


def examine(environment: dict[str, str]) -> dict[str, object]:
    """Returns what `python -m lowtide doctor --json` says."""
    command = [sys.executable, "-m", "lowtide", "doctor", "--json"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    try:
        report: dict[str, object] = json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"`python -m lowtide doctor` failed with exit code {done.returncode}") from None
    return report


def machine(report: dict[str, object]) -> str:
    """Returns the name of the first card as that of a directory: `nvidia-h200`."""
    checks = report["checks"]
    assert isinstance(checks, list)
    names = [check["found"].split(",")[0] for check in checks if re.fullmatch(r"card \d+", check["name"])]
    if not names:
        return "no-card"
    count = f"-x{len(names)}" if len(names) > 1 else ""
    return re.sub(r"[^a-z0-9]+", "-", names[0].lower()).strip("-") + count


def run(step: str, report: dict[str, object], record: Path, environment: dict[str, str]) -> bool:
    """Runs one step, writes its record, and returns whether it succeeded."""
    print(f"\n=== {step}", flush=True)
    python = sys.executable
    if step == "doctor":
        (record / "doctor.json").write_text(json.dumps(report, indent=1) + "\n")
        code, _ = watch([python, "-m", "lowtide", "doctor"], environment)
    elif step == "build":
        code, _ = watch([python, "-m", "lowtide", "build"], environment)
    elif step == "tests":
        code, lines = watch([python, "-m", "pytest", "-q", "-rs", "python/tests/gpu"], environment)
        (record / "tests.txt").write_text("".join(lines))
    else:
        code, lines = watch(MEASUREMENT_OF[step].command(), environment)
        measured = [value for line in lines if (value := measurement_in(line)) is not None]
        keep(record / f"{MEASUREMENT_OF[step].program}.jsonl", step, measured)
        if code == 0 and not measured:
            print(f"{step} measured nothing")
            return False
    if code != 0:
        print(f"{step} failed with exit code {code}")
    return code == 0


def keep(path: Path, step: str, measured: list[dict[str, object]]) -> None:
    """Puts what a step measured into a file, in the place of what it measured before."""
    lines = path.read_text().splitlines() if path.exists() else []
    others = [line for line in lines if json.loads(line)["step"] != step]
    ours = [json.dumps({"step": step, **value}) for value in measured]
    path.write_text("".join(f"{line}\n" for line in [*others, *ours]))


def watch(command: list[str], environment: dict[str, str]) -> tuple[int, list[str]]:
    """Runs a command, shows what it prints, and returns its exit code and its lines."""
    lines = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        limit = threading.Timer(STEP_SECONDS_MAX, process.kill)
        limit.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        limit.cancel()
    return process.returncode, lines


def measurement_in(line: str) -> dict[str, object] | None:
    """Returns what a line says was measured: an object with a name."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and isinstance(value.get("name"), str) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
