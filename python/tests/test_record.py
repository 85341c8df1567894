"""`lowtide.record`, and `lowtide record` around a script."""

import json
import os
import pickle
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from machine import MEMORY, Machine

LOWTIDE = shutil.which("lowtide", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))

CHURN = """
    import random, resource

    def churn(steps, seed=1):
        chance, held = random.Random(seed), []
        for _ in range(steps):
            if held and chance.random() < 0.45:
                free(held.pop(chance.randrange(len(held))))
            else:
                held.append(allocate(1 << chance.randrange(4, 24)))
        return held

    def limit_files(length):
        resource.setrlimit(resource.RLIMIT_FSIZE, (length, resource.RLIM_INFINITY))

    def outgrow(length):
        # The stand-in driver's memory is a file, too.
        free(allocate(512))
        limit_files(length)
        for _ in range(100):
            free(allocate(512))
"""


@pytest.fixture
def gpu(gpu: Machine) -> Machine:
    """Only what `caching` did can be verified."""
    gpu.environment["LOWTIDE_STRATEGY"] = "caching"
    return gpu


def verified(machine: Machine, name: str) -> dict[str, int]:
    """Returns what a replay of a recording found."""
    assert LOWTIDE is not None
    done = machine.command(LOWTIDE, "replay", "--verify", "--json", name)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    found: dict[str, int] = result["verified"]
    return found


def test_a_block_of_the_program_is_recorded(gpu: Machine) -> None:
    program = """
        early = churn(200)
        with lowtide.record("a.lowtide") as recording:
            late = churn(1000, 2)
        print(recording.path)
        recording.stop()
        churn(10, 3)
    """
    assert gpu.code(MEMORY, CHURN, program) == "a.lowtide\n"
    found = verified(gpu, "a.lowtide")
    assert found["same_address"] == found["compared"] > 500
    assert found["first_difference"] is None


def test_a_python_program_is_put_on_lowtide(machine: Machine) -> None:
    assert LOWTIDE is not None
    machine.write("script.py", "import torch; torch.cuda.memory.current.allocate(1000, 0, None)")
    for command in (
        ["script.py"],
        [sys.executable, "script.py"],
        [sys.executable, "-m", "lowtide", "run", "script.py"],
    ):
        done = machine.command(LOWTIDE, "record", "-o", "job.lowtide", *command)
        assert done.returncode == 0, done
        assert re.search(r"recorded \d+ events", done.stderr), done.stderr
        (machine.directory / "job.lowtide").unlink()


def test_what_cannot_be_recorded_is_said(gpu: Machine) -> None:
    program = """
        print(refusal(lowtide.record, "no/such/file"))
        recording = lowtide.record("b.lowtide")
        print(refusal(lowtide.record, "c.lowtide"))
        recording.stop()
        full = lowtide.record("full.lowtide")
        outgrow(100)
        print(refusal(full.stop))
        for named in (lowtide.record, lowtide.set_backup_directory):
            try:
                named("cut\\0short")
            except ValueError as error:
                print(error)
        print(os.path.exists("cut"))
    """
    first, second, third, *rest = gpu.code(MEMORY, CHURN, program).splitlines()
    assert rest == ["a zero byte in the path 'cut\\x00short'"] * 2 + ["False"]
    assert first == "Error nothing is recorded: no/such/file: No such file or directory (os error 2)"
    assert second == "StartedError a recording is being made already: stop it first"
    assert third.startswith("Error the recording to full.lowtide ended: File too large")


def test_what_the_program_raises_is_not_hidden(gpu: Machine) -> None:
    program = """
        try:
            with lowtide.record("full.lowtide"):
                outgrow(100)
                raise KeyError("the program's own")
        except KeyError as error:
            print(error)
        limit_files(resource.RLIM_INFINITY)
        with lowtide.record("next.lowtide"):
            churn(100)
    """
    assert gpu.code(MEMORY, CHURN, program) == '"the program\'s own"\n'
    assert verified(gpu, "next.lowtide")["compared"] > 30


def test_a_part_is_not_recorded_where_the_whole_is(gpu: Machine) -> None:
    assert LOWTIDE is not None
    program = """
        churn(100)
        with lowtide.record("part.lowtide"):
            churn(200)
        churn(100)
    """
    gpu.write("script.py", "".join(map(textwrap.dedent, (MEMORY, CHURN, program))))
    done = gpu.command(LOWTIDE, "record", "-o", "whole.lowtide", sys.executable, "script.py")
    assert done.returncode == 0, done.stderr
    part, whole = done.stderr.splitlines()
    assert part.startswith("lowtide: part.lowtide is not written: ")
    assert whole.startswith("lowtide: recorded ")
    assert not (gpu.directory / "part.lowtide").exists()
    assert verified(gpu, "whole.lowtide")["compared"] > 200


def test_the_command_records_each_process(gpu: Machine) -> None:
    assert LOWTIDE is not None
    gpu.write("script.py", "".join(map(textwrap.dedent, (MEMORY, CHURN, "churn(2000)\n"))))
    for rank in ("0", "1"):
        done = gpu.command(
            LOWTIDE, "record", "-o", f"job{rank}.lowtide", sys.executable, "script.py", RANK=rank, WORLD_SIZE="2"
        )
        assert done.returncode == 0, done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("lowtide: recorded ")
        found = verified(gpu, f"job{rank}.rank{rank}.lowtide")
        assert found["same_address"] == found["compared"] > 1000


def test_an_earlier_recording_stays_until_there_is_another(gpu: Machine) -> None:
    assert LOWTIDE is not None
    gpu.write("script.py", "".join(map(textwrap.dedent, (MEMORY, CHURN, "churn(300)\n"))))

    def record(script: str) -> bytes:
        gpu.command(LOWTIDE, "record", "-o", "r.lowtide", sys.executable, script)
        return (gpu.directory / "r.lowtide").read_bytes()

    first = record("script.py")
    assert record("scirpt.py") == first
    assert record("script.py") != first
    assert sorted(path.name for path in gpu.directory.iterdir()) == ["r.lowtide", "script.py"]


def test_a_script_that_raises_leaves_a_whole_file(gpu: Machine) -> None:
    assert LOWTIDE is not None
    gpu.write("script.py", "".join(map(textwrap.dedent, (MEMORY, CHURN, "churn(300)\nraise SystemExit(5)\n"))))
    done = gpu.command(LOWTIDE, "record", "-o", "r.lowtide", sys.executable, "script.py")
    assert done.returncode == 5
    assert "the end is missing" not in gpu.command(LOWTIDE, "replay", "r.lowtide").stderr


STACKS = """
    import threading

    def leaf(size):
        return allocate(size)

    class Model:
        def step(self, size):
            return leaf(size)

    with lowtide.record("s.lowtide", stacks=True):
        for _ in range(3):
            free(Model().step(MIB))
        thread = threading.Thread(target=leaf, args=(2 * MIB,))
        thread.start()
        thread.join()
    free(leaf(3 * MIB))
    with lowtide.record("none.lowtide"):
        leaf(4 * MIB)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs Python 3.11")
def test_the_first_request_has_its_stack(gpu: Machine) -> None:
    assert LOWTIDE is not None
    gpu.write("first.py", textwrap.dedent(MEMORY) + "\ndef begin():\n    return allocate(1000)\n\nbegin()\nbegin()\n")
    done = gpu.command(LOWTIDE, "record", "--stacks", "-o", "first.lowtide", sys.executable, "-u", "first.py")
    assert done.returncode == 0, done
    events = recorded(gpu, "first.lowtide")
    stacks = [[frame["name"] for frame in event["frames"]] for event in events if event["action"] == "alloc"]
    assert stacks == [["allocate", "begin", "<module>"]] * 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs Python 3.11")
def test_stacks_are_recorded_where_they_are_asked_for(gpu: Machine) -> None:
    assert LOWTIDE is not None
    gpu.code(MEMORY, STACKS)
    events = recorded(gpu, "s.lowtide")
    allocations = [event for event in events if event["action"] == "alloc"]
    assert len(allocations) == 4
    innermost = [[frame["name"] for frame in event["frames"]][:4] for event in allocations]
    assert innermost[0] == ["allocate", "leaf", "Model.step", "<module>"]
    assert innermost[0] == innermost[1] == innermost[2]
    assert innermost[3] == ["allocate", "leaf", "Thread.run", "Thread._bootstrap_inner"]
    assert allocations[0]["frames"][1]["line"] > 0
    assert all(not event.get("frames") for event in events if event["action"].startswith("free"))
    assert all(not event.get("frames") for event in recorded(gpu, "none.lowtide"))


def recorded(machine: Machine, name: str) -> list[dict[str, Any]]:
    """Returns the events of device 0 in a recording."""
    assert LOWTIDE is not None
    done = machine.command(LOWTIDE, "convert", name, f"{name}.pickle")
    assert done.returncode == 0, done.stderr
    events: list[dict[str, Any]] = pickle.loads((machine.directory / f"{name}.pickle").read_bytes())["device_traces"][0]
    return events
