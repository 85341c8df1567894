"""The largest batch or sequence with which a job completes in a given amount of memory.

    python frontier.py JOB [--memory GIB]
    lowtide run frontier.py JOB [--memory GIB]

Runs the job in a new process for each size: twice as large until one runs out of memory, then between the two. Prints
one JSON line for each size, and one with the largest. `--size SIZE` runs one size alone.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

OUT_OF_MEMORY = 3


@dataclass
class Job:
    """A job of `jobs.py`, by the argument that makes it larger."""

    argument: str
    smallest: int
    # Sizes are multiples of this.
    unit: int
    steps: int


JOBS = {
    "gpt2_train": Job("batch", 8, 1, 6),
    "llama_varlen": Job("longest", 4096, 64, 20),
    "rlhf": Job("longest", 704, 32, 8),
}


def run(name: str, size: int, memory_gib: float) -> int:
    """Runs a job of one size, prints its figures and returns the exit code."""
    import jobs  # type: ignore[import-not-found]
    import torch

    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(memory_gib * jobs.GIB / total)
    torch.manual_seed(0)
    random.seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        step, _ = getattr(jobs, name)(**{JOBS[name].argument: size})
        jobs.run(step, JOBS[name].steps)
        completed = True
    except RuntimeError as error:
        # cuBLAS has an error of its own where it finds no memory.
        if not isinstance(error, torch.OutOfMemoryError) and "ALLOC_FAILED" not in str(error):
            raise
        completed = False
    free, total = torch.cuda.mem_get_info()
    figures = {"name": name, "size": size, "completed": completed, "device_used": total - free}
    print(json.dumps(figures | jobs.figures()), flush=True)
    return 0 if completed else OUT_OF_MEMORY


def largest(completes: Callable[[int], bool], job: Job) -> int:
    """Returns the largest size that completes, zero if the smallest does not."""
    if not completes(job.smallest):
        return 0
    fits, fails = job.smallest, 2 * job.smallest
    while completes(fails):
        fits, fails = fails, 2 * fails
    while fails - fits > job.unit:
        middle = (fits + fails) // 2 // job.unit * job.unit
        fits, fails = (middle, fails) if completes(middle) else (fits, middle)
    return fits


def main() -> int:
    """Runs one size, or searches for the largest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=JOBS)
    parser.add_argument("--memory", type=float, default=24.0, help="GiB that the job may reserve")
    parser.add_argument("--size", type=int)
    arguments = parser.parse_args()
    if arguments.size is not None:
        return run(arguments.name, arguments.size, arguments.memory)

    def completes(size: int) -> bool:
        command = [sys.executable, __file__, arguments.name, "--memory", str(arguments.memory), "--size", str(size)]
        code = subprocess.run(command, check=False).returncode
        if code not in (0, OUT_OF_MEMORY):
            raise RuntimeError(f"{arguments.name} of size {size} ended with {code}")
        return code == 0

    print(json.dumps({"name": arguments.name, "largest": largest(completes, JOBS[arguments.name])}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
