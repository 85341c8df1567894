"""Makes the CUDA libraries that a PyTorch was linked against, for a machine that has neither them nor a card.

Memory, streams, events and captures are those of a `libcuda.so.1`; see `cuda`. What else PyTorch wants is there by
name, and says that it is not supported, or, where it would only start kernels, that it went well.
"""

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "cuda"
RUNTIME = ["device.c", "memory.c", "streams.c", "kernels.c", "entry_points.c"]
NVIDIA = re.compile(r"lib(cu(?!da\.so)|nccl|nvrtc|nvshmem|nvtx|nvtoolsext|nvjitlink)", re.IGNORECASE)
FUNCTION = re.compile(r"cu|nccl|pnccl|nvrtc|nvshmem|nvtx|__cuda")
DOES_NOTHING = re.compile(r"libcublas")
SUCCESS, NOT_SUPPORTED = 0, 801


@dataclass
class Needed:
    """What of NVIDIA's a set of libraries refers to and does not have."""

    names: set[str] = field(default_factory=set)
    functions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    unversioned: set[str] = field(default_factory=set)

    @classmethod
    def by(cls, libraries: list[Path]) -> "Needed":
        """Reads the dynamic symbols of every library."""
        needed, defined = cls(), set()
        for library in libraries:
            needed.names.update(filter(NVIDIA.match, re.findall(r"NEEDED.*\[(.*)\]", _read("readelf", "-d", library))))
            for kind, symbol in _symbols(library):
                name, _, version = symbol.partition("@")
                if kind != "U":
                    defined.add(name)
                elif version:
                    needed.functions[version].add(name)
                elif FUNCTION.match(name):
                    needed.unversioned.add(name)
        needed.unversioned -= defined
        needed.names -= {library.name for library in libraries}
        return needed

    def versions_of(self, name: str) -> list[str]:
        """Returns the versions of symbols that are a library's: they are called as it is, or nearly."""
        stem = name.split(".so")[0]
        return [
            version for version in self.functions if stem in (version.split(".so")[0], f"lib{version.lower()}_host")
        ]


def sources() -> str:
    """Returns everything that the libraries are made of but PyTorch."""
    files = [Path(__file__), *sorted(SOURCES.iterdir())]
    return "".join(file.read_text() for file in files)


def make(torch_libraries: Path, headers: Path, target: Path) -> None:
    """Puts every library that is needed into an empty directory."""
    needed = Needed.by(sorted(torch_libraries.glob("*.so*")))
    for name in needed.names:
        versions = {version: needed.functions[version] for version in needed.versions_of(name)}
        written = _written(name)
        # Symbols without a version are found in whichever library has them.
        loose = needed.unversioned if name.startswith("libcudnn") else set()
        functions = set().union(loose, *versions.values()) - _defined_in(written)
        stand_in = target / f"{name}.c"
        stand_in.write_text(_stand_ins(functions, SUCCESS if DOES_NOTHING.match(name) else NOT_SUPPORTED))
        script = target / f"{name}.map"
        script.write_text("\n".join(_version_nodes(versions)))
        _compile(target / name, [stand_in, *written], headers, f"-Wl,--version-script={script}")
    _compile(target / "libnvidia-ml.so.1", [SOURCES / "management.c"], headers)


def _written(name: str) -> list[Path]:
    """Returns the sources of what a library does."""
    if name.startswith("libcudart"):
        return [SOURCES / source for source in RUNTIME]
    return [SOURCES / "blas.c"] if DOES_NOTHING.match(name) else []


def _defined_in(sources: list[Path]) -> set[str]:
    definition = re.compile(r"^[a-z][\w *]*[ *](\w+)\([^;{]*\{", re.MULTILINE)
    return {name for source in sources for name in definition.findall(source.read_text())}


def _stand_ins(functions: set[str], answer: int) -> str:
    return "\n".join(f"int {name}(void) {{ return {answer}; }}" for name in sorted(functions))


def _version_nodes(versions: dict[str, set[str]]) -> Iterator[str]:
    for version, functions in versions.items():
        yield f"{version} {{ global: {' '.join(f'{name};' for name in sorted(functions))} }};"
    if not versions:
        yield "{ global: *; };"


def _compile(target: Path, sources: list[Path], headers: Path, *options: str) -> None:
    # The compiler knows other types for functions of some of these names.
    command = ["cc", "-shared", "-fPIC", "-O1", "-fno-builtin", "-w", "-I", str(headers), *map(str, sources), *options]
    subprocess.run([*command, f"-Wl,-soname,{target.name}", "-o", str(target), "-ldl", "-lpthread"], check=True)


def _symbols(library: Path) -> Iterator[tuple[str, str]]:
    """Yields what is said of each symbol, `U` for an undefined one, and its name and version, parted by one `@`."""
    for line in _read("nm", "-D", "--with-symbol-versions", library).splitlines():
        *_, kind, symbol = line.split()
        yield kind, symbol.replace("@@", "@")


def _read(*command: object) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout
