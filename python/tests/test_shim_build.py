"""The shim compiles without a warning against every PyTorch at hand.

The installed PyTorch is taken, if there is one, and those whose `torch` directories LOWTIDE_TORCH_ROOTS
names, separated by colons; of them `version.py` and `include` are enough:

    pip download --no-deps torch==2.15.0
    unzip torch-2.15.0-*.whl 'torch/include/*' torch/version.py -d torch-2.15
"""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from lowtide.torch import build


def installed() -> list[Path]:
    spec = importlib.util.find_spec("torch")
    return [Path(spec.origin).parent] if spec is not None and spec.origin is not None else []


def roots() -> list[Path]:
    return [
        *installed(),
        *(Path(root) for root in os.environ.get("LOWTIDE_TORCH_ROOTS", "").split(":") if root),
    ]


def version(root: Path) -> str:
    found = re.search(r"__version__ = '(.+?)'", (root / "version.py").read_text())
    assert found is not None
    return found[1]


@pytest.mark.parametrize("root", roots(), ids=version)
def test_compiles_without_a_warning(root: Path) -> None:
    command = [*build.compiler(), *build.compile_arguments(root, version(root))]
    made = subprocess.run(
        [*command, "-fsyntax-only", "-Wall", "-Wextra", "-Werror"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize("root", roots(), ids=version)
def test_what_pytorch_keeps_for_cublas_is_as_its_header_says(root: Path, tmp_path: Path) -> None:
    header = (root / "include" / "ATen" / "cuda" / "CUDAContextLight.h").read_text()
    kept = re.search(r"std::map<\s*std::tuple<void ?\*, ?void ?\*>, (.+)>(?: map;|& cublas_handle)", header)
    assert kept is not None
    program = tmp_path / "workspaces.cpp"
    program.write_text(
        f'#include "workspaces.h"\nstatic_assert(std::is_same_v<at::cuda::Workspaces::mapped_type, {kept[1]}>);\n'
    )
    arguments = [
        str(program) if name.endswith("shim.cpp") else name for name in build.compile_arguments(root, version(root))
    ]
    command = [*build.compiler(), *arguments, "-I", str(build.SOURCES), "-fsyntax-only"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr


def test_headers_of_conda_forge_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build, "_package_roots", lambda name: [])
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    directories = [tmp_path / "targets" / "sbsa-linux" / "include", tmp_path / "include"]
    for directory, header in zip(directories, ["crt/host_defines.h", "cuda_runtime_api.h"], strict=True):
        (directory / header).parent.mkdir(parents=True)
        (directory / header).touch()
    # Only where the environment is conda's.
    assert build._conda_roots() == []
    (tmp_path / "conda-meta").mkdir()
    assert build.cuda_includes()[:2] == directories


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, for a PyTorch that is installed."""
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lowtide"


def test_is_built_once(cache: Path) -> None:
    build.build()
    (shim,) = cache.glob("*/shim.so")
    made = shim.stat().st_mtime_ns
    build.build()
    assert shim.stat().st_mtime_ns == made
    assert [path.name for path in cache.iterdir()] == [shim.parent.name]


def test_a_shim_that_is_cut_short_is_built_anew(cache: Path) -> None:
    build.build()
    (shim,) = cache.glob("*/shim.so")
    whole = shim.read_bytes()
    # A new file: this process has the old one loaded.
    shim.unlink()
    shim.write_bytes(whole[: len(whole) // 2])
    assert build.find() is None
    build.build()
    assert shim.read_bytes() == whole


def test_a_cache_that_would_be_another_in_each_directory_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    for named in ("", "cache", "./cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert build.cache_directory() == Path("/nonexistent/.cache/lowtide")


def test_a_compiler_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ '-m64")
    with pytest.raises(build.BuildError, match=r"^CXX names no C\+\+ compiler \(No closing quotation\): g\+\+ '-m64$"):
        build.compiler()


def test_a_compiler_that_is_not_there_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(build.BuildError, match="CXX names, no-such-compiler,"):
        build.build()
    assert not list(cache.glob("*/shim.so"))


def test_what_does_not_compile_is_said_in_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: ["sh", "-c", "echo note >&2; echo 'x: error: no' >&2; exit 1"])
    with pytest.raises(build.BuildError, match=r"does not compile with sh: x: error: no \(the rest is in ") as caught:
        build.build()
    assert "\n" not in str(caught.value)
    (log,) = cache.glob("*/shim.log")
    assert log.read_text() == "note\nx: error: no\n"


def test_a_directory_that_cannot_be_written_to_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(build.BuildError, match="set XDG_CACHE_HOME"):
        build.build()


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(build.BuildError, match=r"no place for the shim \(Could not determine .*set XDG_CACHE_HOME"):
        build.cache_directory()
