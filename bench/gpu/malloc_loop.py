"""A C program that takes and gives back memory in a loop, by itself and with lowtide in front of the driver.

    python malloc_loop.py

Compiles malloc_loop.c with the compiler `cc` and prints one JSON line for each size and each of both.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# With the driver alone, each takes some hundred microseconds.
PAIRS = "300"


def runtime() -> str | None:
    """Returns the CUDA runtime that came with PyTorch, if it did."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec is not None else None
    found = [path for root in roots or [] for path in sorted(Path(root).glob("*/lib/libcudart.so.*"))]
    return str(found[0]) if found else None


def main() -> None:
    """Runs both."""
    environment = dict(os.environ)
    if (library := runtime()) is not None:
        environment.setdefault("LIBCUDART", library)
    with tempfile.TemporaryDirectory() as directory:
        program = os.path.join(directory, "malloc_loop")
        subprocess.run(["cc", "-O2", str(HERE / "malloc_loop.c"), "-ldl", "-o", program], check=True)
        preloaded = [sys.executable, "-m", "lowtide", "run", "--preload", program]
        for label, command in {"driver": [program], "lowtide": preloaded}.items():
            command = [*command, PAIRS]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            for line in done.stdout.splitlines():
                words = line.split()
                if len(words) == 4 and all(word.isdigit() for word in words):
                    names = ("pair_ns", "with_memset_ns", "in_stream_order_ns")
                    figures = dict(zip(names, map(int, words[1:]), strict=True))
                    print(json.dumps({"name": f"{words[0]} bytes", "label": label, **figures}), flush=True)


if __name__ == "__main__":
    main()
