"""`lowtide run`: a script, unmodified, on lowtide.

A new Python replaces this process and runs the script, so `__main__`, `sys.argv`, `sys.path`, tracebacks and the exit
code are Python's own. A command that starts Python, such as `torchrun`, replaces this process, too. Their `PYTHONPATH`
has `_startup/sitecustomize.py`, which Python imports by itself, and which installs lowtide at `import torch`. Children
that inherit the environment (torchrun, `spawn`, a shell) do the same. A process without PyTorch pays a few
milliseconds. A forked child has its parent's state.

`--preload` is for programs without Python or PyTorch. The program runs with liblowtide.so in front of NVIDIA's driver,
by the loader's `LD_PRELOAD`. PyTorch keeps its own allocator there, unless `LOWTIDE_COMPAT` names packages. Then the
environment is the same as a script's.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from ._categories import VARIABLE
from ._errors import Error, NoDriverError, report_line
from ._install import REPORTED, RUN_PREFIX, choose, configure, find_driver, report_unread_settings
from ._library import PATH
from .compat._aliases import check_environment, names_of_environment

STARTUP = Path(__file__).parent / "_startup"


def run(arguments: list[str]) -> NoReturn:
    """Replaces this process by a Python that runs a script on lowtide, by a command whose Pythons are on lowtide, or by
    any program with `--preload`.

    `arguments` are the arguments after `run`.
    """
    switches, strategy, config, program = parse(arguments)
    if "--preload" in switches:
        if "--categories" in switches:
            raise Error("`--categories` needs lowtide in PyTorch, and `--preload` leaves PyTorch its own allocator")
        run_preloaded(strategy, config, program)
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise Error("`run` does not work with Python's options -E, -I and -S, which children would have too")
    configure(strategy, config)
    check_environment()
    environment = script_environment(os.environ, strategy, config)
    if "--categories" in switches:
        environment[VARIABLE] = "1"
    try:
        find_driver()
        report_unread_settings(strategy, config)
    except NoDriverError as error:
        if "LOWTIDE_RECORD" in os.environ:
            raise
        # A script that runs without a GPU runs without lowtide. If `LOWTIDE_COMPAT` names packages, the script still
        # needs those: then the error is reported when it imports PyTorch.
        if not names_of_environment():
            report_line(f"{error}: the script runs without lowtide")
            environment = dict(os.environ)
    if not is_script(program[0]):
        replace_process(program, environment)
    python = sys.executable
    os.execve(python, [python, *interpreter_options(sys.orig_argv, len(sys.argv)), *program], environment)


def is_script(word: str) -> bool:
    """Returns whether the Python that runs this process runs a script or module itself, rather than a command."""
    if word.startswith("-") or word.endswith(".py"):
        return True
    if "/" not in word and shutil.which(word) is not None:
        return False
    # Python reports a script that does not exist.
    return not os.path.isfile(word) or not os.access(word, os.X_OK)


def run_preloaded(strategy: str | None, config: str | None, program: list[str]) -> NoReturn:
    """Replaces this process by a program with lowtide in front of the driver, in its children, too.

    If `LOWTIDE_COMPAT` names packages, every Python among them uses lowtide's packages and installs lowtide in PyTorch.
    """
    # Without options, use lowtide's defaults and ignore PyTorch's variables.
    has_options = config is not None or ":" in (strategy or "")
    has_options |= strategy is None and os.environ.get("LOWTIDE_CONF", "") != ""
    choose(strategy, config if has_options else "")
    check_environment()
    with_environment = script_environment if names_of_environment() else with_choice
    environment = with_environment(os.environ, strategy, config)
    environment["LOWTIDE_PRELOAD"] = "1"
    environment["LD_PRELOAD"] = preload_list(str(PATH), os.environ.get("LD_PRELOAD"))
    replace_process(program, environment)


def replace_process(program: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Replaces this process by a program. If that fails, ends it with the exit code that shells use."""
    try:
        os.execvpe(program[0], program, environment)
    except OSError as error:
        report_line(f"{program[0]}: {error.strerror}")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def preload_list(library: str, present: str | None) -> str:
    """Returns the value of `LD_PRELOAD` with the library in front of the user's own."""
    if " " in library or ":" in library:
        raise Error(f"{library}: LD_PRELOAD takes no path with a space or a colon in it; install lowtide elsewhere")
    return f"{library}:{present}" if present else library


def parse(arguments: list[str]) -> tuple[set[str], str | None, str | None, list[str]]:
    """Returns the switches, the strategy, the options, and the command: `["train.py", "--epochs", "3"]`."""
    values: dict[str, str] = {}
    rest = list(arguments)
    switches: set[str] = set()
    while rest and rest[0].startswith("--"):
        if rest[0] == "--":
            rest.pop(0)
            break
        if rest[0] in ("--preload", "--categories"):
            switches.add(rest.pop(0))
            continue
        name, equals, value = rest.pop(0).partition("=")
        if name not in ("--strategy", "--config"):
            raise Error(f"unknown option `{name}`; options of the script come after its name")
        if not equals and not rest:
            raise Error(f"`{name}` takes a value")
        values[name] = value if equals else rest.pop(0)
    if not rest or not rest[0]:
        raise Error(
            f"no {'program' if '--preload' in switches else 'script'} given; `lowtide run --help` has the usage"
        )
    # `-` is standard input. The value of `-m` or `-c` may be in the same word.
    if rest[0].startswith("-") and rest[0] != "-" and not rest[0].startswith(("-m", "-c")):
        raise Error(f"unknown option `{rest[0]}`; Python's own come before `-m lowtide`")
    return switches, values.get("--strategy"), values.get("--config"), rest


def interpreter_options(original: list[str], argument_count: int) -> list[str]:
    """Returns the options that Python was started with before `-m lowtide`, like `["-u", "-X", "dev"]`.

    `original` is `sys.orig_argv`, `argument_count` the length of `sys.argv`.
    """
    options = original[1 : len(original) - argument_count + 1]
    if options and options[-1] == "lowtide":
        options.pop()
    # The rest ends with `-m`, `-mlowtide`, or `-um` for `-u -m`.
    if options:
        letters = options.pop().removesuffix("lowtide").removesuffix("m")
        if letters != "-":
            options.append(letters)
    return options


def with_choice(environment: Mapping[str, str], strategy: str | None, config: str | None) -> dict[str, str]:
    """Returns the environment with this strategy and these options for lowtide."""
    changed = dict(environment)
    if strategy is not None:
        name, colon, options = strategy.partition(":")
        changed["LOWTIDE_STRATEGY"] = name
        # Options in the environment belong to the strategy in the environment.
        changed.pop("LOWTIDE_CONF", None)
        if colon:
            config = options
    if config is not None:
        changed["LOWTIDE_CONF"] = config
    return changed


def script_environment(environment: Mapping[str, str], strategy: str | None, config: str | None) -> dict[str, str]:
    """Returns the environment that makes a Python and its children install lowtide with this strategy and options."""
    changed = with_choice(environment, strategy, config)
    changed.pop(REPORTED, None)
    changed[RUN_PREFIX] = sys.prefix
    path = changed.get("PYTHONPATH")
    changed["PYTHONPATH"] = os.pathsep.join([str(STARTUP), path] if path else [str(STARTUP)])
    return changed
