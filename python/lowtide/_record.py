"""Recordings: everything that happens to the memory of every device, in a file."""

import contextlib
import os
import sys
from types import TracebackType

from ._errors import Error
from ._library import check, library, path_to_c


class Recording:
    """A recording that is being made, until `stop` or the end of the `with` block or of the process."""

    def __init__(self, path: str, is_made: bool = True) -> None:
        self.path = path
        """The file as it was named; a rank of several puts its number before the extension."""
        self._is_made = is_made

    def stop(self) -> None:
        """Ends the recording and completes its file. A second call does nothing.

        Raises `Error` where the recording had ended before because the file could not be written to.
        """
        if self._is_made:
            self._is_made = False
            check(library().lowtide_record_stop())

    def __enter__(self) -> "Recording":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
        else:
            # What the program raised says more, and what became of the file was told.
            with contextlib.suppress(Error):
                self.stop()


def record(path: str | os.PathLike[str] = "recording.lowtide", stacks: bool = False) -> Recording:
    """Records everything that happens on every device from now on to a file. An earlier recording there is replaced.

    What is held already is recorded as such. `lowtide replay`, `advise`, `report`, `leaks`, `diff` and `convert` read
    the file, also while it is written, and after the process was killed. In a rank of several (`RANK`, `WORLD_SIZE`)
    the rank's number goes before the extension of the name, as in `recording.rank3.lowtide`.

        with lowtide.record("step.lowtide"):
            step()

    With `stacks`, each request is recorded with the functions of Python that led to it, which needs Python 3.11, and
    in threads that are in none, such as those in which PyTorch works backward, with those of C++.

    Where the environment (`LOWTIDE_RECORD`, as `lowtide record` sets it) has the whole process recorded already, this
    records nothing of its own, and a line on standard error says so.

    Where the file cannot be written to any more, a line on standard error says so, and the program goes on.

    Raises `StartedError` while another recording is made, and `Error` where the file cannot be created, or is one
    already that is no recording.
    """
    name = os.fspath(path)
    if whole := os.environ.get("LOWTIDE_RECORD"):
        print(f"lowtide: {name} is not written: {whole} (LOWTIDE_RECORD) has it all", file=sys.stderr, flush=True)
        return Recording(name, is_made=False)
    check(library().lowtide_record_start(path_to_c(name), stacks))
    return Recording(name)
