"""`bench/gpu/run.py`: which steps run, what of them is recorded, and that one that fails stops no other."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from machine import Machine

PROGRAM = Path(__file__).resolve().parents[2] / "bench" / "gpu" / "run.py"


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_steps", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_step_that_fails_stops_no_other(machine: Machine) -> None:
    # The PyTorch of these tests has no headers to build with and nothing to measure.
    done = machine.run(str(PROGRAM), "--record", "record", "build", "latency/pytorch", "doctor")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == ["record: record", "failed: build, latency/pytorch"], done
    record = machine.directory / "record"
    report = json.loads((record / "doctor.json").read_text())
    assert report["works"]
    assert (record / "latency.jsonl").read_text() == ""


def test_steps_are_named_or_begun(steps: ModuleType) -> None:
    assert steps.chosen([])[:3] == ["doctor", "build", "tests"]
    assert steps.chosen(["tests", "latency/caching", "tests"]) == ["tests", "latency/caching"]
    jobs = steps.chosen(["jobs/gpt2_train"])
    assert jobs[0] == "jobs/gpt2_train/pytorch"
    assert "jobs/gpt2_train/exact/caching" in jobs
    assert steps.chosen(["saver"]) == ["saver/tms", "saver/lowtide"]
    assert steps.MEASUREMENT_OF["saver/tms"].command()[-2:] == [str(PROGRAM.parent / "saver.py"), "tms"]
    with pytest.raises(ValueError, match="unknown step 'job'"):
        steps.chosen(["job"])
    for measurement in steps.MEASUREMENTS:
        assert (PROGRAM.parent / f"{measurement.program}.py").exists()
    assert len(steps.MEASUREMENT_OF) == len(steps.MEASUREMENTS)


def test_a_package_that_is_not_there_is_said(machine: Machine) -> None:
    done = machine.run(str(PROGRAM.parent / "saver.py"), "tms")
    assert done.returncode == 0
    assert json.loads(done.stdout) == {
        "name": "not measured",
        "reason": "torch_memory_saver is not installed: pip install torch_memory_saver==0.0.10",
    }


def test_a_record_keeps_what_other_steps_measured(steps: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    steps.keep(path, "jobs/a/pytorch", [{"name": "a", "ms": 1}])
    steps.keep(path, "jobs/a/caching", [{"name": "a", "ms": 2}, {"name": "b", "ms": 3}])
    steps.keep(path, "jobs/a/pytorch", [{"name": "a", "ms": 4}])
    figures = [(line["step"], line["ms"]) for line in map(json.loads, path.read_text().splitlines())]
    assert figures == [("jobs/a/caching", 2), ("jobs/a/caching", 3), ("jobs/a/pytorch", 4)]


def test_measurements_are_told_from_other_lines(steps: ModuleType) -> None:
    assert steps.measurement_in('{"name": "a", "ms": 1}\n') == {"name": "a", "ms": 1}
    for line in ("", "building\n", "1\n", '{"ms": 1}\n', '{"name": 1}\n'):
        assert steps.measurement_in(line) is None


def test_a_record_is_named_by_the_cards(steps: ModuleType) -> None:
    def machine_of(*cards: str) -> str:
        checks = [{"name": f"card {index}", "found": f"{card}, 139.80 GiB"} for index, card in enumerate(cards)]
        name: str = steps.machine({"checks": [{"name": "driver", "found": "x"}, *checks]})
        return name

    assert machine_of() == "no-card"
    assert machine_of("NVIDIA H200") == "nvidia-h200"
    assert machine_of("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb-x2"
