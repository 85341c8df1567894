"""`python -m lowtide run`: a script, unmodified, on lowtide.

The script is run by a new Python in place of this one, so that everything about it is Python's own doing:
`__main__`, `sys.argv`, `sys.path`, tracebacks, the exit code. That Python, and every one that is started
from it with its environment (by torchrun, `spawn`, a shell), finds `_startup/sitecustomize.py` on its
`PYTHONPATH`, which Python imports by itself, and which waits for `import torch`: a process without PyTorch
pays a few milliseconds, and a child that was forked has what its parent had.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from ._errors import Error, NoDriverError
from ._hook import RUN_PREFIX
from ._install import configure, find_driver, tell
from .compat._aliases import names_of_environment

STARTUP = Path(__file__).parent / "_startup"

USAGE = """\
usage: python -m lowtide run [--strategy NAME[:CONF]] [--config CONF] SCRIPT [ARGUMENT]...
       python -m lowtide run [--strategy NAME[:CONF]] [--config CONF] -m MODULE [ARGUMENT]..."""


def run(arguments: list[str]) -> NoReturn:
    """Becomes a Python that runs a script on lowtide. `arguments` is what follows `run`."""
    strategy, config, program = parse(arguments)
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise Error("`run` does not work with Python's options -E, -I and -S, which children would have too")
    configure(strategy, config)
    names_of_environment()
    environment = dict(os.environ)
    try:
        find_driver()
        environment = script_environment(environment, strategy, config)
    except NoDriverError as error:
        # A script that can do without a GPU can do without lowtide.
        tell(f"{error}: the script runs without lowtide")
    python = sys.executable
    os.execve(python, [python, *interpreter_options(sys.orig_argv, len(sys.argv)), *program], environment)


def parse(arguments: list[str]) -> tuple[str | None, str | None, list[str]]:
    """Returns strategy, options, and what Python is to run: `["train.py", "--epochs", "3"]`."""
    values: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("--"):
        name, equals, value = rest.pop(0).partition("=")
        if name not in ("--strategy", "--config"):
            raise Error(f"unknown option `{name}`; options of the script come after its name")
        if not equals and not rest:
            raise Error(f"`{name}` takes a value")
        values[name] = value if equals else rest.pop(0)
    if not rest:
        raise Error("no script given; `python -m lowtide run --help` has the usage")
    # `-` is standard input, and what `-m` and `-c` take may follow in the same word.
    if rest[0].startswith("-") and rest[0] != "-" and not rest[0].startswith(("-m", "-c")):
        raise Error(f"unknown option `{rest[0]}`; Python's own come before `-m lowtide`")
    return values.get("--strategy"), values.get("--config"), rest


def interpreter_options(original: list[str], argument_count: int) -> list[str]:
    """Returns the options that Python was started with before `-m lowtide`, like `["-u", "-X", "dev"]`.

    `original` is `sys.orig_argv`, `argument_count` the length of `sys.argv`.
    """
    options = original[1 : len(original) - argument_count + 1]
    if options and options[-1] == "lowtide":
        options.pop()
    # What is left ends with `-m`, `-mlowtide`, or `-um` for `-u -m`.
    if options:
        letters = options.pop().removesuffix("lowtide").removesuffix("m")
        if letters != "-":
            options.append(letters)
    return options


def script_environment(environment: Mapping[str, str], strategy: str | None, config: str | None) -> dict[str, str]:
    """Returns the environment in which a Python and its children install lowtide with this choice."""
    changed = dict(environment)
    if strategy is not None:
        name, colon, options = strategy.partition(":")
        changed["LOWTIDE_STRATEGY"] = name
        # Options in the environment are for the strategy that is named there.
        changed.pop("LOWTIDE_CONF", None)
        if colon:
            config = options
    if config is not None:
        changed["LOWTIDE_CONF"] = config
    changed[RUN_PREFIX] = sys.prefix
    path = changed.get("PYTHONPATH")
    changed["PYTHONPATH"] = os.pathsep.join([str(STARTUP), path] if path else [str(STARTUP)])
    return changed
