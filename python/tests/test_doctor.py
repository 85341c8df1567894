"""`python -m lowtide doctor`: what is there, and what is not."""

import json
from pathlib import Path
from sysconfig import get_path
from typing import Any

import pytest
from machine import Machine


def examine(machine: Machine, **variables: str) -> tuple[dict[str, Any], bool]:
    """Returns every check by its name, and whether lowtide works."""
    done = machine.run("-m", "lowtide", "doctor", "--json", **variables)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["works"] else 1)
    return {check["name"]: check for check in report["checks"]}, report["works"]


def features(machine: Machine, **variables: str) -> list[dict[str, Any]]:
    """Returns what can be done, and what keeps it from that."""
    done = machine.run("-m", "lowtide", "doctor", "--json", **variables)
    return list(json.loads(done.stdout)["features"])


def test_a_check_is_one_line(machine: Machine) -> None:
    printed = machine.code(
        r"""
        from lowtide._doctor import Check, text
        print(text([Check("driver", "missing", "a\n\x1b[31mb\u202ec d é")]), end="")
        """
    )
    assert printed == "missing  driver  a\\n\\x1b[31mb\\u202ec d é\n"


@pytest.fixture
def headers(machine: Machine) -> Machine:
    """A machine with everything that the shim takes."""
    for name in ("cuda_runtime_api.h", "crt/host_defines.h"):
        machine.write(f"cuda/include/{name}", "")
    machine.environment["CUDA_HOME"] = str(machine.directory / "cuda")
    return machine


def test_all_is_well(headers: Machine) -> None:
    checks, works = examine(headers)
    assert works
    assert {check["state"] for check in checks.values()} == {"ok"}, checks
    assert checks["card 0"]["found"].startswith("fakecuda device 0, 8.00 GiB")
    assert checks["PyTorch"]["found"] == "2.11.0+cu130, for CUDA 13.0"
    assert checks["configuration"]["found"] == "tide"
    assert checks["shim"]["found"].startswith("not built yet")
    assert not any(feature["obstacles"] for feature in features(headers))
    conf = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    checks, _ = examine(headers, **conf)
    assert checks["configuration"]["found"] == "tide, which does not read PYTORCH_ALLOC_CONF"
    checks, _ = examine(headers, LOWTIDE_STRATEGY="caching", **conf)
    assert checks["configuration"]["found"] == "caching:expandable_segments:True"


def test_what_the_command_says_is_said_alike(headers: Machine) -> None:
    ours = headers.run("-m", "lowtide", "doctor").stdout.splitlines()
    theirs = headers.command(str(Path(get_path("scripts")) / "lowtide"), "doctor").stdout.splitlines()
    assert theirs == ours


@pytest.mark.parametrize(
    ("variables", "name", "state", "found"),
    [
        ({"LD_LIBRARY_PATH": ""}, "driver", "missing", "NVIDIA's driver cannot be loaded: libcuda.so.1"),
        ({"FAKECUDA_FAIL": "cuInit:1:100"}, "driver", "missing", "NVIDIA's driver shows this process no device"),
        ({"FAKE_TORCH_VERSION": "2.5.0"}, "PyTorch", "missing", "PyTorch 2.5.0 is too old"),
        ({"FAKE_TORCH_CUDA": ""}, "PyTorch", "missing", "this PyTorch, 2.11.0+cu130, is built without CUDA"),
        ({"FAKE_TORCH_CARDS": "0"}, "PyTorch's cards", "missing", "the driver is older than PyTorch"),
        ({"FAKE_TORCH_VERSION": "2.16.0"}, "shim", "limited", "it is for PyTorch 2.8 to 2.15"),
        ({"CXX": "no-such-compiler"}, "shim", "limited", "cannot be built: the C++ compiler that CXX names"),
        ({"LOWTIDE_STRATEGY": "best"}, "configuration", "missing", "Unknown strategy 'best'"),
        ({"LOWTIDE_CONF": "x:1"}, "configuration", "missing", "Unrecognized key 'x'"),
    ],
)
def test_what_is_missing_is_named(
    headers: Machine, variables: dict[str, str], name: str, state: str, found: str
) -> None:
    checks, works = examine(headers, **variables)
    assert works == (state == "limited")
    assert checks[name]["state"] == state
    assert checks[name]["found"].startswith(found)
    assert checks[name]["advice"]
    others = {other["state"] for other in checks.values() if other["name"] != name}
    assert others == {"ok"}, checks


def test_each_feature_says_whether_it_will_work(headers: Machine) -> None:
    def obstacles(**variables: str) -> dict[str, list[str]]:
        return {feature["name"]: feature["obstacles"] for feature in features(headers, **variables)}

    seen = obstacles(CXX="no-such-compiler")
    assert seen["torch.cuda.memory_stats, snapshots, torch.OutOfMemoryError"] == ["shim"]
    assert seen["PyTorch's memory, CUDA graphs"] == seen["lowtide.region, pause and resume"] == []
    seen = obstacles(FAKE_TORCH_CARDS="0")
    assert seen["lowtide.region, pause and resume"] == ["PyTorch's cards"]
    assert seen["lowtide run --preload"] == seen["recordings, lowtide top, Prometheus"] == []
    assert all(obstacles(LD_LIBRARY_PATH="").values())
    lines = headers.run("-m", "lowtide", "doctor", CXX="no-such-compiler").stdout.splitlines()
    assert "can      lowtide.region, pause and resume" in lines
    assert "cannot   torch.cuda.MemPool, torch.compile with graphs: see shim" in lines


@pytest.mark.parametrize(
    ("check", "hindered"),
    [
        (
            "card 1 virtual memory",
            ["the same of expandable segments", "expandable_segments", "lowtide.region, pause and resume"],
        ),
        ("card 10 sharing", ["the same of expandable segments"]),
        ("card 0 GPUDirect RDMA", []),
    ],
)
def test_what_a_card_cannot_do(headers: Machine, check: str, hindered: list[str]) -> None:
    done = headers.run(
        "-c",
        "import json, sys\n"
        "from lowtide._doctor import Check, features\n"
        "known = features([Check('shim', 'ok', ''), Check(sys.argv[1], 'limited', 'no')])\n"
        "print(json.dumps([feature.name for feature in known if feature.obstacles == [sys.argv[1]]]))",
        check,
    )
    assert json.loads(done.stdout) == hindered


def test_the_command_that_does_not_run_leaves_everything_unknown(headers: Machine) -> None:
    code = (
        "from lowtide._doctor import Check, features\n"
        "print(all(feature.obstacles for feature in features([Check('command', 'limited', '')])))"
    )
    assert headers.run("-c", code).stdout == "True\n"


def test_pytorch_that_is_not_there(gpu: Machine) -> None:
    checks, works = examine(gpu)
    assert not works
    assert checks["PyTorch"]["advice"] == "pip install torch"
    done = gpu.run("-m", "lowtide", "doctor")
    assert done.returncode == 1
    assert "→ pip install torch\n" in done.stdout


def test_bad_arguments(bare: Machine) -> None:
    assert bare.refusal("doctor", "--jsn") == "`doctor` does not take `--jsn`"
    assert bare.refusal("build", "--json") == "`build` does not take `--json`"
