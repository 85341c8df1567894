"""Where the processes of the tests run."""

import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

CompletedProcess: TypeAlias = "subprocess.CompletedProcess[str]"

# Memory through C, which the stand-in driver lets be read and written while it is mapped.
MEMORY = """
    import ctypes, json, os, threading, lowtide
    from lowtide._library import check, library

    def allocate(size, device=0):
        memory = ctypes.c_void_p()
        check(library().lowtide_allocate(size, device, None, ctypes.byref(memory)))
        return memory.value

    def free(memory):
        check(library().lowtide_deallocate(memory))

    def read(memory, size):
        return ctypes.string_at(memory, size)

    def write(memory, content):
        ctypes.memmove(memory, content, len(content))

    def live():
        return {(seen["tag"], seen["backup"]): seen["live_bytes"] for seen in lowtide.regions()}

    def refusal(act, *arguments):
        try:
            act(*arguments)
        except lowtide.Error as error:
            return f"{type(error).__name__} {error}"

    MIB = 1 << 20
"""


# As much of PyTorch as `disable` touches, and threads.
THREADS = """
    from contextlib import ExitStack, nullcontext

    def in_thread(act):
        answers = []
        thread = threading.Thread(target=lambda: answers.append(act()))
        thread.start()
        thread.join()
        return answers[0]
"""

ALIAS = """
    import lowtide.compat
    lowtide.compat.install_as_torch_memory_saver()
"""


@dataclass
class Machine:
    """Where a process runs: its environment and its directory."""

    directory: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *arguments: str, **variables: str) -> CompletedProcess:
        """Runs Python with these arguments and, for this once, more variables."""
        return self.command(sys.executable, *arguments, **variables)

    def command(self, *command: str, **variables: str) -> CompletedProcess:
        """Runs a command."""
        environment = {**self.environment, **variables}
        return subprocess.run(
            command,
            cwd=self.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def code(self, *parts: str, **variables: str) -> str:
        """Runs some lines of Python that have to succeed, and returns what they print."""
        done = self.run("-c", "".join(map(textwrap.dedent, parts)), **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refusal(self, *arguments: str, **variables: str) -> str:
        """Returns the one line in which `python -m lowtide` refuses these arguments."""
        done = self.run("-m", "lowtide", *arguments, **variables)
        assert done.returncode == 2, done
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        return line.removeprefix("lowtide: ")

    def write(self, name: str, text: str) -> Path:
        """Writes a file that the process finds in its directory."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path
