"""The callbacks for `Trainer` and for Lightning, with fakes of these, and a PyTorch that only counts."""

import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest
from machine import MEMORY, CompletedProcess, Machine

LEAK = Path(__file__).parents[2] / "crates/cli/tests/data/leak.pyenv.pickle.gz"

# What the callbacks call, on a machine with two devices. `hold` is what a tensor does.
TORCH = """
    import gzip, pickle
    from types import SimpleNamespace

    MIB = 1 << 20
    held, most, calls, observers = [0, 0], [0, 0], [], []

    def hold(size, device=0):
        held[device] += size
        most[device] = max(most[device], held[device])

    def stats(device):
        return {f"{name}_bytes.all.peak": factor * most[device]
                for name, factor in (("requested", 3), ("allocated", 4), ("reserved", 8))}

    def reset(device):
        most[device] = held[device]

    def snapshot():
        with gzip.open("leak.pickle.gz") as file:
            return pickle.load(file)

    def run_out():
        for observer in observers:
            observer(0, 1, 2, 3)
        raise MemoryError("out of memory")

    _C = SimpleNamespace(
        _cuda_attach_out_of_memory_observer=observers.append,
        _cuda_isHistoryEnabled=lambda: calls[-1:] == ["on"],
    )
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        memory_stats=stats,
        reset_peak_memory_stats=reset,
        memory=SimpleNamespace(
            _record_memory_history=lambda *a, **k: calls.append("on" if k else "off"),
            _snapshot=snapshot,
        ),
    )
"""

HEAD = """
    import json, os, torch
    from torch import MIB

    def step(number):
        print("recording" if torch.calls[-1:] == ["on"] else "not recording", number)
        torch.hold((number + 1) * MIB)
        torch.hold(-(number + 1) * MIB)
"""

TRAINER = """
    from transformers import Trainer
    from lowtide.transformers import MemoryCallback

    def train(step, rank=0, ranks=1, steps=6, **arguments):
        trainer = Trainer(step, [MemoryCallback(**arguments)], steps, rank, ranks)
        trainer.train()
        return trainer.state.log_history if rank else trainer.integration.seen
"""

LIGHTNING = """
    from lowtide.lightning import MemoryCallback
    from lightning.pytorch import Trainer

    def train(step, rank=0, ranks=1, steps=6, **arguments):
        trainer = Trainer([MemoryCallback(**arguments)], 1, steps, rank, ranks)
        trainer.fit(step)
        assert trainer.loggers[0].seen == trainer.loggers[1].seen
        # `Trainer` counts from 1.
        return [{**logged, "step": logged["step"] + 1} for logged in trainer.loggers[0].seen]
"""

FRAMEWORKS = {"transformers": TRAINER, "lightning": LIGHTNING}


@pytest.fixture(params=FRAMEWORKS)
def train(request: pytest.FixtureRequest) -> str:
    """Code that trains with a framework."""
    return FRAMEWORKS[request.param]


@pytest.fixture
def job(machine: Machine) -> Machine:
    machine.write("torch.py", TORCH)
    shutil.copy(LEAK, machine.directory / "leak.pickle.gz")
    return machine


def run(job: Machine, *parts: str, **variables: str) -> CompletedProcess:
    """Runs a program that may fail."""
    job.write("train.py", "".join(map(textwrap.dedent, parts)))
    return job.run("train.py", **variables)


def printed(done: CompletedProcess) -> list[dict[str, float]]:
    """Returns what was logged of the memory, from the last line of a program that succeeds."""
    assert done.returncode == 0, done.stderr
    logged: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return [row for row in logged if any(name.startswith("memory/") for name in row)]


def test_the_peaks_since_the_last_log_are_logged(job: Machine, train: str) -> None:
    done = run(job, HEAD, train, "torch.hold(500 * MIB); torch.hold(-500 * MIB); print(json.dumps(train(step)))")
    logged = printed(done)
    assert [row["step"] for row in logged] == [2, 4, 6]
    for row in logged:
        # The second device is never used.
        assert row["memory/peak_allocated_gib"] == round(4 * row["step"] / 1024, 4)
        assert row["memory/peak_reserved_gib"] == round(8 * row["step"] / 1024, 4)
        assert row["memory/fragmentation_percent"] == 62.5
    assert "recording" not in done.stdout.replace("not recording", "")
    assert not (job.directory / "out").exists()
    assert done.stderr == ""


def test_the_device_that_reserved_most_counts(job: Machine, train: str) -> None:
    program = "torch.hold(100 * MIB, 1); print(json.dumps(train(step)))"
    assert {row["memory/peak_allocated_gib"] for row in printed(run(job, HEAD, train, program))} == {0.3906}


def categories(machine: Machine, name: str) -> dict[str, float]:
    done = machine.run("-m", "lowtide", "summary", "--json", name)
    (device,) = json.loads(done.stdout)
    # Stacks of lowtide's own recordings need Python 3.11.
    held = (device["categories"] or {}).items()
    return {f"memory/categories/{name}_gib": round(held["bytes"] / (1 << 30), 4) for name, held in held}


def test_the_steps_asked_for_are_recorded(job: Machine, train: str) -> None:
    done = run(job, HEAD, train, "print(json.dumps(train(step, record_steps=range(2, 4))))")
    logged = printed(done)
    steps = [line for line in done.stdout.splitlines() if line.startswith("recording")]
    assert steps == ["recording 2", "recording 3"]
    assert done.stderr == "lowtide: recorded out/memory.pickle\n"
    expected = categories(job, "out/memory.pickle")
    assert expected["memory/categories/activations_gib"] > 0
    assert [row["step"] for row in logged if expected.items() <= row.items()] == [4]
    assert sum("memory/categories/unknown_gib" in row for row in logged) == 1


@pytest.mark.parametrize("steps", [5, 6])
def test_a_training_may_end_within_the_steps(job: Machine, train: str, steps: int) -> None:
    program = f"print(json.dumps(train(step, steps={steps}, record_steps=range(4, 99), path='of/its.own')))"
    done = run(job, HEAD, train, program)
    last = printed(done)[-1]
    assert last["step"] == steps
    assert categories(job, "of/its.own").items() <= last.items()


def test_each_rank_records_and_the_first_logs(job: Machine, train: str) -> None:
    for rank in (0, 1):
        program = f"print(json.dumps(train(step, {rank}, 2, record_steps=range(2, 4))))"
        done = run(job, HEAD, train, program)
        assert done.stderr == f"lowtide: recorded out/memory.rank{rank}.pickle\n"
        assert [row["step"] for row in printed(done)] == ([] if rank else [2, 4, 6])
    assert len(list((job.directory / "out").iterdir())) == 2


def test_a_training_that_raises_leaves_its_recording(job: Machine, train: str) -> None:
    program = """
    def fails(number):
        if number == 3:
            raise KeyError("the program's own")

    train(fails, record_steps=range(2, 9))
    """
    done = run(job, HEAD, train, program)
    assert done.returncode == 1
    assert 'KeyError: "the program\'s own"' in done.stderr
    assert done.stderr.count("lowtide: recorded out/memory.pickle") == 1
    assert categories(job, "out/memory.pickle")


def test_an_out_of_memory_error_leaves_its_recording_at_once(job: Machine, train: str) -> None:
    program = """
    def fails(number):
        if number == 3:
            try:
                torch.run_out()
            finally:
                print("there:", os.path.exists("out/memory.pickle"))

    for record_steps in (range(2, 9), range(0, 1)):
        try:
            train(fails, record_steps=record_steps)
        except MemoryError as error:
            print(error)
    print(torch.calls, len(torch.observers))
    """
    done = run(job, HEAD, train, program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["there: True", "out of memory"]
    assert done.stderr.count("lowtide: recorded out/memory.pickle") == 2


def test_another_training_ends_the_recording_of_one_that_raised(job: Machine) -> None:
    program = """
    def fails(number):
        if number == 3:
            raise KeyError

    trainer = Trainer(fails, [MemoryCallback(record_steps=range(2, 9))])
    try:
        trainer.train()
    except KeyError:
        print(torch.calls)
    trainer.step = step
    trainer.train()
    print(torch.calls)
    """
    done = run(job, HEAD, TRAINER, program)
    lines = done.stdout.splitlines()
    assert lines[0] == "['on']"
    assert lines[1:3] == ["not recording 0", "not recording 1"]
    assert lines[-1] == "['on', 'off', 'on', 'off']"


def test_a_history_of_the_programs_own_goes_on(job: Machine, train: str) -> None:
    program = """
    torch.cuda.memory._record_memory_history(max_entries=7)
    train(step, record_steps=range(2, 4))
    print(torch.calls, os.path.getsize("out/memory.pickle") > 0)
    """
    done = run(job, HEAD, train, program)
    assert done.stdout.splitlines()[-1] == "['on'] True"


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("torch.cuda.memory_stats", "the figures"),
        ("torch.cuda.memory._record_memory_history", "the start"),
        ("torch.cuda.memory._snapshot", "the end"),
    ],
)
def test_errors_are_printed_once_and_end_no_training(job: Machine, train: str, broken: str, why: str) -> None:
    program = f"""
    def fail(*given, **named):
        # The history can be ended still.
        if given != (None,):
            raise RuntimeError("{why}\\nand more")

    {broken} = fail
    print(json.dumps(train(step, record_steps=range(2, 5))))
    """
    done = run(job, HEAD, train, program)
    assert done.returncode == 0
    assert "recording 5" in done.stdout
    lines = [line for line in done.stderr.splitlines() if why in line]
    text = f"lowtide: the training goes on, but its memory is not recorded or logged: {why}"
    assert set(lines) == {text}
    # Once for each hook: the figures are asked for at the beginning, too.
    assert len(lines) == (2 if why == "the figures" else 1)


def test_no_gpu_is_one_line(job: Machine, train: str) -> None:
    program = """
    torch.cuda.is_initialized = lambda: False
    print(json.dumps(train(step)))
    print(json.dumps(train(step, record_steps=range(2, 5))))
    """
    done = run(job, HEAD, train, program)
    assert printed(done) == []
    (line,) = done.stderr.splitlines()
    assert line.endswith("this process uses no GPU")


@pytest.mark.parametrize("steps", ["5", "range(0, 9, 2)", "(10, 13)"])
def test_what_is_no_range_is_refused(job: Machine, train: str, steps: str) -> None:
    done = run(job, train, f"MemoryCallback(record_steps={steps})")
    assert f"ValueError: record_steps is a range of steps, such as range(10, 13), not {steps}" in done.stderr


def test_the_metrics_of_evaluations_are_left_alone(job: Machine) -> None:
    program = """
    evaluated = {"eval_loss": 0.5}

    def evaluate(number):
        if number == 3:
            trainer.log(evaluated)

    trainer = Trainer(evaluate, [MemoryCallback(record_steps=range(2, 3))])
    trained = trainer.train()
    print(json.dumps([evaluated, trained, trainer.state.log_history, trainer.integration.seen]))
    """
    evaluated, trained, history, seen = json.loads(run(job, HEAD, TRAINER, program).stdout.splitlines()[-1])
    assert evaluated == {"eval_loss": 0.5}
    assert trained == {"train_loss": 0.5}
    assert history == seen
    assert sum("memory/peak_allocated_gib" in row for row in history) == 3
    assert [row["step"] for row in history if "memory/categories/unknown_gib" in row] == [4]


def test_a_callback_that_was_added_later_is_seen(job: Machine) -> None:
    program = """
    trainer = Trainer(step, [])
    trainer.handler.callbacks.append(MemoryCallback())
    trainer.train()
    print(json.dumps(trainer.integration.seen))
    """
    assert len(printed(run(job, HEAD, TRAINER, program))) == 3


def test_accumulated_batches_are_one_step(job: Machine) -> None:
    program = """
    trainer = Trainer([MemoryCallback(record_steps=range(1, 2))], accumulate_grad_batches=3, max_steps=4)
    trainer.fit(step)
    print(json.dumps(trainer.loggers[0].seen))
    """
    done = run(job, HEAD, LIGHTNING, program)
    steps = [line for line in done.stdout.splitlines() if line.startswith("recording")]
    assert steps == ["recording 3", "recording 4", "recording 5"]
    logged = printed(done)
    assert [row["step"] for row in logged] == [1, 3]
    assert [row["memory/peak_allocated_gib"] for row in logged] == [round(4 * 6 / 1024, 4), round(4 * 12 / 1024, 4)]


@pytest.mark.parametrize(
    ("imports", "base"),
    [
        ("import pytorch_lightning", "pytorch_lightning"),
        ("import sys; sys.modules['lightning'] = None", "pytorch_lightning"),
        ("import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None", "ImportError"),
        ("import lightning", "lightning.pytorch"),
        ("", "lightning.pytorch"),
    ],
)
def test_the_base_is_of_the_package_that_is_there(job: Machine, imports: str, base: str) -> None:
    program = f"""
    {imports}
    try:
        from lowtide.lightning import MemoryCallback
        print(MemoryCallback.__base__.__module__)
    except ImportError as error:
        print("ImportError", error.name)
    """
    assert run(job, program).stdout.split()[0] == base


ON_LOWTIDE = """
    import torch
    lowtide.install()
    torch.cuda.is_initialized = lambda: True

    def step(number):
        free(allocate((number + 1) * MIB))
"""


def on_lowtide(machine: Machine, train: str, call: str, **variables: str) -> CompletedProcess:
    """Runs a training on lowtide, without the shim."""
    return run(machine, MEMORY, train, ON_LOWTIDE, f"print(json.dumps({call}))", **variables)


def test_a_job_on_lowtide_is_recorded_by_lowtide(machine: Machine, train: str) -> None:
    done = on_lowtide(machine, train, "train(step, record_steps=range(2, 4))", FAKE_TORCH_VERSION="2.7.0")
    logged = printed(done)
    assert "lowtide: recorded out/memory.lowtide" in done.stderr
    assert [row["step"] for row in logged] == [2, 4, 6]
    assert [row["memory/peak_allocated_gib"] for row in logged] == [0.002, 0.0039, 0.0059]
    assert categories(machine, "out/memory.lowtide").items() <= logged[1].items()
    replayed = machine.run("-m", "lowtide", "replay", "--json", "--strategy", "tide", "out/memory.lowtide")
    assert json.loads(replayed.stdout)["trace"]["allocs"] == 2


def test_each_rank_on_lowtide_has_a_file(machine: Machine, train: str) -> None:
    call = "train(step, 1, 2, record_steps=range(2, 4))"
    # Lightning's own launcher sets no rank.
    for variables in ({"RANK": "1", "WORLD_SIZE": "2"}, {}):
        done = on_lowtide(machine, train, call, FAKE_TORCH_VERSION="2.7.0", **variables)
        assert "lowtide: recorded out/memory.rank1.lowtide" in done.stderr
        (file,) = (machine.directory / "out").iterdir()
        assert file.name == "memory.rank1.lowtide"
        file.unlink()


def test_steps_are_not_recorded_where_the_whole_job_is(machine: Machine, train: str) -> None:
    done = on_lowtide(
        machine,
        train,
        "train(step, record_steps=range(2, 4))",
        FAKE_TORCH_VERSION="2.7.0",
        LOWTIDE_RECORD="whole.lowtide",
    )
    assert len(printed(done)) == 3
    assert done.stderr.count("out/memory.lowtide is not written: whole.lowtide (LOWTIDE_RECORD) has it all") == 1
    assert not re.search("recorded out|categories", done.stderr + done.stdout)
