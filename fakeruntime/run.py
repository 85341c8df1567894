"""Runs Python with a release of PyTorch, from PyPI, on a machine without a GPU.

    python3 fakeruntime/run.py 2.15.0 -m lowtide run train.py
    python3 fakeruntime/run.py 2.15.0 -m pytest python/tests/gpu

Memory, streams, events and captures are those of `crates/fakecuda`. Kernels do nothing: what a job computes means
nothing, what memory it asks for does. lowtide is the package in `python`, which `python3 python/stage.py` builds.
The first run of a release downloads it into `target/fakeruntime`.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python"
sys.path.append(str(PACKAGE))

from release import Release  # noqa: E402


def main() -> None:
    """Becomes the Python that is asked for."""
    if len(sys.argv) < 3:
        sys.exit("usage: run.py VERSION ARGUMENT...\n\nVERSION is PyTorch's, the rest is for Python")
    release = Release(sys.argv[1], ROOT / "target/fakeruntime" / sys.argv[1])
    release.prepare()
    environment = {**os.environ, **release.environment(PACKAGE)}
    os.execve(release.python, [str(release.python), *sys.argv[2:]], environment)


if __name__ == "__main__":
    main()
