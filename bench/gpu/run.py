"""Everything that needs a GPU, one step after the other, and a record of it: `cargo xtask gpu`, or without cargo

    python3 bench/gpu/run.py [--record DIRECTORY] [STEP]...

The steps are `doctor`; `build`, the shim; `tests`, those of `python/tests/gpu`; and each other program in this
directory, by its name. Without STEP it is all of them. A step that fails does not keep the others from running; at the
end the failed ones are named, and the exit code is 1.

The PyTorch is that of this Python. lowtide is the directory `python`, if `python3 python/stage.py` has put the library
there, else what is installed.

A program here takes no arguments and prints one JSON object a line for each thing that it measured, `name` and its
figures: `{"name": "pair, 1 live", "native_ns": 306.1, "lowtide_ns": 71.0}`. Its other lines are for people. It exits
with 0 when it could measure, whatever the figures are, and is killed after half an hour.

The record is `bench/record/<card>/<date>`: `doctor.json`, `tests.txt`, and `NAME.jsonl` for each program. Steps that
did not run leave what is there.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.py")) if path.stem != "run"}
STEPS = ["doctor", "build", "tests", *PROGRAMS]
STEP_SECONDS_MAX = 1800


def main(arguments: list[str]) -> int:
    """Runs the steps and returns the exit code."""
    parser = argparse.ArgumentParser(description="Runs tests and measurements on a GPU, and records them.")
    parser.add_argument("--record", type=Path, help="where to write the record [bench/record/<card>/<date>]")
    parser.add_argument("steps", metavar="STEP", nargs="*", help=f"what to run [all]: {', '.join(STEPS)}")
    options = parser.parse_args(arguments)
    unknown = [step for step in options.steps if step not in STEPS]
    if unknown:
        parser.error(f"unknown step {unknown[0]!r}, steps are {', '.join(STEPS)}")
    environment = package_environment()
    report = examine(environment)
    record = options.record or ROOT / "bench" / "record" / machine(report) / datetime.date.today().isoformat()
    record.mkdir(parents=True, exist_ok=True)
    failed = [step for step in options.steps or STEPS if not run(step, report, record, environment)]
    print(f"\nrecord: {record}")
    print(f"failed: {', '.join(failed)}" if failed else "all steps succeeded")
    return 1 if failed else 0


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
        code, lines = watch([python, str(PROGRAMS[step])], environment)
        measured = "".join(line for line in lines if is_measurement(line))
        if measured:
            (record / f"{step}.jsonl").write_text(measured)
        elif code == 0:
            print(f"{step} measured nothing")
            return False
    if code != 0:
        print(f"{step} failed with exit code {code}")
    return code == 0


def watch(command: list[str], environment: dict[str, str]) -> tuple[int, list[str]]:
    """Runs a command, shows what it prints, and returns its exit code and its lines."""
    lines = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        limit = threading.Timer(STEP_SECONDS_MAX, process.kill)
        limit.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        limit.cancel()
    return process.returncode, lines


def is_measurement(line: str) -> bool:
    """Returns whether a line is an object with a name."""
    try:
        value = json.loads(line)
    except ValueError:
        return False
    return isinstance(value, dict) and isinstance(value.get("name"), str)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
