"""`lowtide doctor`: checks this machine, and says how to fix problems.

The `lowtide` command checks the driver and the cards. The checks that need Python are here.
"""

import json
import subprocess
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ._errors import ConfigError, Error, TorchError, first_line
from ._install import check_torch, configure, shim_obstacle, unread_variable
from ._library import library
from ._memory import version

WITHOUT_SHIM = "lowtide works, but torch.cuda knows nothing about memory, and MemPool is not there"

# The features, and the checks that each needs.
_ANY = ("lowtide", "configuration", "command", "driver", "cards")
_JOB = (*_ANY, "PyTorch", "PyTorch's cards")
FEATURES = (
    ("PyTorch's memory, CUDA graphs", _JOB),
    ("torch.cuda.memory_stats, snapshots, torch.OutOfMemoryError", (*_JOB, "shim")),
    ("torch.cuda.MemPool, torch.compile with graphs", (*_JOB, "shim")),
    ("CUDA tensors in torch.multiprocessing", (*_JOB, "shim")),
    ("the same of expandable segments", (*_JOB, "shim", "virtual memory", "sharing")),
    ("expandable_segments", (*_JOB, "virtual memory")),
    ("lowtide.region, pause and resume", (*_JOB, "virtual memory")),
    ("recordings, lowtide top, Prometheus", _ANY),
    ("lowtide run --preload", _ANY),
)


@dataclass
class Check:
    """The result of a check, with the fields of the `lowtide` command's checks."""

    name: str
    state: Literal["ok", "limited", "missing"]
    found: str
    advice: str | None = None


@dataclass
class Feature:
    """A feature of lowtide, and the checks that prevent it here."""

    name: str
    obstacles: list[str]


def doctor(as_json: bool) -> int:
    """Prints every check and feature. Returns 1 if lowtide does not work here, else 0."""
    checks = [*_package(), *_machine(), *_pytorch()]
    known = list(features(checks))
    works = all(check.state != "missing" for check in checks)
    if as_json:
        lists = {"checks": [asdict(check) for check in checks], "features": [asdict(feature) for feature in known]}
        print(json.dumps({"works": works, **lists}))
    else:
        print(text(checks), text_of_features(known), sep="\n", end="")
    return 0 if works else 1


def features(checks: list[Check]) -> Iterator[Feature]:
    """Returns the features, each with the checks that prevent it on some card."""
    for name, needs in FEATURES:
        yield Feature(name, [check.name for check in checks if check.state != "ok" and _concerns(check, needs)])


def _concerns(check: Check, needs: tuple[str, ...]) -> bool:
    of_card = check.name.startswith("card ") and check.name.endswith(tuple(f" {need}" for need in needs))
    return of_card or check.name in needs


def text_of_features(known: list[Feature]) -> str:
    """Returns one line for each feature."""
    lines = []
    for feature in known:
        state = "cannot" if feature.obstacles else "can"
        reason = f": see {', '.join(feature.obstacles)}" if feature.obstacles else ""
        lines.append(f"{state:7}  {feature.name}{reason}\n")
    return "".join(lines)


def text(checks: list[Check]) -> str:
    """Returns one line for each check, and a second line if it has advice."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state:7}  {check.name:{width}}  {_printable(check.found)}\n")
        if check.advice is not None:
            lines.append(f"{'':7}  {'':{width}}  → {check.advice}\n")
    return "".join(lines)


def _printable(text: str) -> str:
    """Returns a text, such as a path, with escapes for characters that are not printable."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _package() -> Iterator[Check]:
    try:
        library()
    except Error as error:
        yield Check("lowtide", "missing", str(error), "pip install --force-reinstall lowtide")
        return
    yield Check("lowtide", "ok", version())
    try:
        configure(None, None)
    except ConfigError as error:
        advice = "see LOWTIDE_STRATEGY, LOWTIDE_CONF and PYTORCH_CUDA_ALLOC_CONF in the environment"
        yield Check("configuration", "missing", str(error), advice)
    else:
        variable = unread_variable(None, None)
        unread = "" if variable is None else f", which does not read {variable}"
        yield Check("configuration", "ok", library().lowtide_config().decode() + unread)


def _machine() -> Iterator[Check]:
    try:
        done = subprocess.run([_command(), "doctor", "--json", "--without-python"], stdout=subprocess.PIPE, check=False)
        report = json.loads(done.stdout)
    except (OSError, ValueError) as error:
        advice = "pip install --force-reinstall lowtide: without it nothing is known of driver and cards"
        yield Check("command", "limited", f"`lowtide` does not run: {first_line(error)}", advice)
        return
    for check in report["checks"]:
        yield Check(**check)


def _command() -> Path:
    """Returns the path of `lowtide`: in `bin` beside this package, else in Python's scripts directory."""
    beside = Path(__file__).resolve().parents[1] / "bin" / "lowtide"
    return beside if beside.exists() else Path(sysconfig.get_path("scripts")) / "lowtide"


def _pytorch() -> Iterator[Check]:
    try:
        import torch

        check_torch(torch)
    except ImportError as error:
        yield Check("PyTorch", "missing", f"it cannot be imported: {first_line(error)}", "pip install torch")
        return
    except TorchError as error:
        yield Check("PyTorch", "missing", str(error), "install a newer PyTorch, built for CUDA")
        return
    yield Check("PyTorch", "ok", f"{torch.__version__}, for CUDA {torch.version.cuda}")
    yield _pytorch_on_cards(torch)
    obstacle = shim_obstacle(torch)
    if obstacle is not None:
        yield Check("shim", "limited", obstacle, WITHOUT_SHIM)
        return
    yield from _shim()


def _pytorch_on_cards(torch: Any) -> Check:
    # If PyTorch sees no card, its reason is in a warning.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    if is_available:
        return Check("PyTorch's cards", "ok", str(torch.cuda.device_count()))
    reasons = [first_line(warning.message) for warning in caught if isinstance(warning.message, Warning)]
    advice = "PyTorch must see a card: its version must fit the driver, and CUDA_VISIBLE_DEVICES the cards"
    return Check("PyTorch's cards", "missing", next(iter(reasons), "none"), advice)


def _shim() -> Iterator[Check]:
    from .torch import build

    prebuilt = build.prebuilt()
    if prebuilt is not None:
        yield Check("shim", "ok", f"prebuilt: {prebuilt}")
        return
    try:
        shim = build.find()
        if shim is not None:
            yield Check("shim", "ok", f"built: {shim}")
            return
        compiler, includes = build.compiler(), build.cuda_includes()
    except build.BuildError as error:
        yield Check("shim", "limited", f"cannot be built: {error}", WITHOUT_SHIM)
        return
    yield Check("compiler", "ok", " ".join(compiler))
    yield Check("CUDA headers", "ok", str(includes[0]))
    yield Check("shim", "ok", "not built yet: the first use takes half a minute, or `lowtide build` now")
