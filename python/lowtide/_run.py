"""`python -m lowtide run`: a script, unmodified, on lowtide.

The script is run by a new Python in place of this one, so that everything about it is Python's own doing:
`__main__`, `sys.argv`, `sys.path`, tracebacks, the exit code. That Python, and every one that is started
from it with its environment (by torchrun, `spawn`, a shell), finds `_startup/sitecustomize.py` on its
`PYTHONPATH`, which Python imports by itself, and which waits for `import torch`: a process without PyTorch
pays a few milliseconds, and a child that was forked has what its parent had.

`--preload` is for programs that know nothing of Python or PyTorch: the program is run with liblowtide.so in
front of NVIDIA's driver, by the loader's `LD_PRELOAD`. PyTorch keeps its own allocator there, unless
`LOWTIDE_COMPAT` names packages that are to be lowtide's: these take what a script does.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from ._errors import Error, NoDriverError
from ._install import RUN_PREFIX, choose, configure, find_driver, report_unread_settings, tell
from ._library import PATH
from .compat._aliases import check_environment, names_of_environment

STARTUP = Path(__file__).parent / "_startup"

USAGE = """\
usage: python -m lowtide run [--strategy NAME[:CONF]] [--config CONF] SCRIPT [ARGUMENT]...
       python -m lowtide run [--strategy NAME[:CONF]] [--config CONF] -m MODULE [ARGUMENT]...
       python -m lowtide run --preload [--strategy NAME[:CONF]] [--config CONF] PROGRAM [ARGUMENT]..."""


def run(arguments: list[str]) -> NoReturn:
    """Becomes a Python that runs a script on lowtide, or any program. `arguments` is what follows `run`."""
    preload, strategy, config, program = parse(arguments)
    if preload:
        run_preloaded(strategy, config, program)
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise Error("`run` does not work with Python's options -E, -I and -S, which children would have too")
    configure(strategy, config)
    check_environment()
    environment = script_environment(os.environ, strategy, config)
    try:
        find_driver()
        report_unread_settings(strategy, config)
    except NoDriverError as error:
        # A script that can do without a GPU can do without lowtide, and not without the packages that it is to have by
        # other names: it is told there, when it imports PyTorch.
        if not names_of_environment():
            tell(f"{error}: the script runs without lowtide")
            environment = dict(os.environ)
    python = sys.executable
    os.execve(python, [python, *interpreter_options(sys.orig_argv, len(sys.argv)), *program], environment)


def run_preloaded(strategy: str | None, config: str | None, program: list[str]) -> NoReturn:
    """Becomes a program that has lowtide in front of the driver, as its children do.

    Where `LOWTIDE_COMPAT` names packages, those are lowtide's in every Python among them, and so is PyTorch's memory.
    """
    # Without options there are none but lowtide's own, whatever PyTorch's variables say.
    has_options = config is not None or ":" in (strategy or "")
    has_options |= strategy is None and os.environ.get("LOWTIDE_CONF", "") != ""
    choose(strategy, config if has_options else "")
    check_environment()
    with_environment = script_environment if names_of_environment() else with_choice
    environment = with_environment(os.environ, strategy, config)
    environment["LOWTIDE_PRELOAD"] = "1"
    environment["LD_PRELOAD"] = preload_list(str(PATH), os.environ.get("LD_PRELOAD"))
    try:
        os.execvpe(program[0], program, environment)
    except OSError as error:
        tell(f"{program[0]}: {error.strerror}")
        # As shells have it.
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def preload_list(library: str, present: str | None) -> str:
    """Returns the loader's list with the library in front of what the user has in it."""
    if " " in library or ":" in library:
        raise Error(f"{library}: LD_PRELOAD takes no path with a space or a colon in it; install lowtide elsewhere")
    return f"{library}:{present}" if present else library


def parse(arguments: list[str]) -> tuple[bool, str | None, str | None, list[str]]:
    """Returns whether to preload, strategy, options, and what is to run: `["train.py", "--epochs", "3"]`."""
    values: dict[str, str] = {}
    rest = list(arguments)
    preload = False
    while rest and rest[0].startswith("--"):
        if rest[0] == "--":
            rest.pop(0)
            break
        if rest[0] == "--preload":
            preload = bool(rest.pop(0))
            continue
        name, equals, value = rest.pop(0).partition("=")
        if name not in ("--strategy", "--config"):
            raise Error(f"unknown option `{name}`; options of the script come after its name")
        if not equals and not rest:
            raise Error(f"`{name}` takes a value")
        values[name] = value if equals else rest.pop(0)
    if not rest or not rest[0]:
        raise Error(f"no {'program' if preload else 'script'} given; `python -m lowtide run --help` has the usage")
    # `-` is standard input, and what `-m` and `-c` take may follow in the same word.
    if rest[0].startswith("-") and rest[0] != "-" and not rest[0].startswith(("-m", "-c")):
        raise Error(f"unknown option `{rest[0]}`; Python's own come before `-m lowtide`")
    return preload, values.get("--strategy"), values.get("--config"), rest


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


def with_choice(environment: Mapping[str, str], strategy: str | None, config: str | None) -> dict[str, str]:
    """Returns the environment in which lowtide is used with this choice."""
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
    return changed


def script_environment(environment: Mapping[str, str], strategy: str | None, config: str | None) -> dict[str, str]:
    """Returns the environment in which a Python and its children install lowtide with this choice."""
    changed = with_choice(environment, strategy, config)
    changed[RUN_PREFIX] = sys.prefix
    path = changed.get("PYTHONPATH")
    changed["PYTHONPATH"] = os.pathsep.join([str(STARTUP), path] if path else [str(STARTUP)])
    return changed
