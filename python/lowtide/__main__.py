"""`python -m lowtide`: the program `lowtide`. What needs PyTorch is done here: run, build, doctor."""

import os
import sys

from . import _run
from ._doctor import doctor
from ._errors import Error, first_line, report_line
from ._report import find_command


def main(arguments: list[str]) -> int:
    """Runs a command and returns the exit code: 2 for an error in the arguments or on the machine."""
    command, rest = (arguments or [""])[0], arguments[1:]
    is_own = command in ("run", "build", "doctor")
    asks_for_help = [word for word in rest if word != "--preload"] in (["-h"], ["--help"])
    try:
        if not is_own or asks_for_help:
            program = find_command()
            os.execv(program, [program, *(arguments or ["--help"])])
        if command == "run":
            _run.run(rest)
        as_json = rest == ["--json"] and command == "doctor"
        if rest and not as_json:
            raise Error(f"`{command}` does not take `{rest[0]}`")
        return build() if command == "build" else doctor(as_json)
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
