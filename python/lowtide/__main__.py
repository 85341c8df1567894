"""`python -m lowtide`: run, build, doctor. The other commands are those of the program `lowtide`."""

import os
import sys

from . import _run, version
from ._doctor import doctor
from ._errors import Error
from ._install import first_line, report_line
from ._report import find_command

USAGE = """\
usage: python -m lowtide COMMAND

  run [--strategy NAME[:CONF]] [--config CONF] SCRIPT [ARGUMENT]...
      runs a script (or `-m MODULE`) with lowtide as PyTorch's allocator
  run --preload [--strategy NAME[:CONF]] [--config CONF] PROGRAM [ARGUMENT]...
      runs any program that calls CUDA with lowtide in front of the driver
  build
      builds the shim for the PyTorch that is installed, ahead of its first use
  doctor [--json]
      says what lowtide finds on this machine, and what to do about what is missing

  summary, replay, advise, convert, report, diff, leaks, record, top
      what the program `lowtide` does: `lowtide --help` says it, and `python -m lowtide replay --help`
  --version
"""

COMMANDS = ("summary", "replay", "advise", "convert", "report", "diff", "leaks", "record", "top")


def main(arguments: list[str]) -> int:
    """Runs a command and returns the exit code: 2 for an error in the arguments or on the machine."""
    command, rest = (arguments or ["--help"])[0], arguments[1:]
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if command in ("-V", "--version"):
        print(f"lowtide {version()}")
        return 0
    has_own_help = command in ("run", "build", "doctor")
    if has_own_help and [word for word in rest if word != "--preload"] in (["-h"], ["--help"]):
        print(_run.USAGE if command == "run" else USAGE)
        return 0
    try:
        if command in COMMANDS:
            program = find_command()
            os.execv(program, [program, *arguments])
        if command == "run":
            _run.run(rest)
        if command in ("build", "doctor"):
            as_json = rest == ["--json"] and command == "doctor"
            if rest and not as_json:
                raise Error(f"`{command}` does not take `{rest[0]}`")
            return build() if command == "build" else doctor(as_json)
        raise Error(f"unknown command `{command}`; `python -m lowtide --help` lists them")
    except Error as error:
        report_line(str(error))
        return 2


def build() -> int:
    """Builds the shim and prints its path."""
    from .torch.build import build

    try:
        print(build()._name)
    except Exception as error:
        raise Error(f"the shim cannot be built: {first_line(error)}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
