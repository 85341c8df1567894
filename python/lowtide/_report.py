"""`lowtide report` from Python: a page about recordings, or about this process, which a notebook shows."""

import html
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from ._errors import Error
from ._memory import dump_snapshot


class Report:
    """A page in one file. A notebook shows it in a sandbox that cannot access the notebook."""

    def __init__(self, path: Path, owner: object = None) -> None:
        self.path = path
        """The file. It is deleted with this object if `output` was not given."""
        self._owner = owner

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"), quote=True)
        style = "width:100%;height:48em;border:1px solid"
        return f'<iframe title="lowtide report" sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'


def report(*recordings: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Report:
    """Returns a page about recordings, or about this process's memory if none is given.

    The command `lowtide report` writes the same page. A recording is a snapshot of PyTorch or a file of `record`.
    `output` is the path of the page; without it, the page is deleted with the returned object.

    Raises `Error` with the command's message if a recording cannot be read. Also raises it if the command is missing,
    or if this process has no memory to report on.
    """
    temporary = tempfile.TemporaryDirectory(prefix="lowtide-report-")
    directory = Path(temporary.name)
    inputs = [os.fspath(recording) for recording in recordings]
    if not inputs:
        inputs = [str(directory / "now.pickle")]
        dump_snapshot(inputs[0])
    path = directory / "report.html" if output is None else Path(output)
    try:
        run_command("report", *inputs, "-o", str(path))
    except Error as error:
        if not recordings and "no allocation is recorded" in str(error):
            raise Error("this process has asked lowtide for no GPU memory: there is nothing to report") from None
        raise
    return Report(path, temporary if output is None else None)


def run_command(*arguments: str) -> str:
    """Runs the `lowtide` command and returns its output. Raises `Error` with its message if it fails."""
    done = subprocess.run(
        [find_command(), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        # The output has paths, which may be any bytes.
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"`lowtide {arguments[0]}` ended with {done.returncode}"]
        raise Error(lines[-1].removeprefix("lowtide: "))
    return done.stdout


def find_command() -> str:
    """Returns the `lowtide` command that was installed with this package, else the one on `PATH`."""
    places = [Path(sysconfig.get_path("scripts")), Path(__file__).parent.parent / "bin"]
    found = (place / "lowtide" for place in places if os.access(place / "lowtide", os.X_OK))
    command = next(map(str, found), None) or shutil.which("lowtide")
    if command is None:
        raise Error("the command `lowtide` is not there: install lowtide anew")
    return command
