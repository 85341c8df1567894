"""Recordings: files with all memory events of every device."""

import contextlib
import os
import sys
from types import TracebackType

from ._errors import Error
from ._library import check, library, path_to_c


class Recording:
    """A recording in progress, until `stop`, or the end of the `with` block or of the process."""

    def __init__(self, path: str, is_active: bool = True) -> None:
        self.path = path
        """The path as given. In a job with several ranks, the file's name has the rank before its extension."""
        self.is_active = is_active
        """Whether events are recorded to the file. `False` where `LOWTIDE_RECORD` records the whole process."""

    def stop(self) -> None:
        """Ends the recording and completes its file. A second call does nothing.

        Raises `Error` if the recording had ended before, because the file could not be written.
        """
        if self.is_active:
            self.is_active = False
            check(library().lowtide_record_stop())

    def __enter__(self) -> "Recording":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
        else:
            # The program's own exception matters more. A failure of the file was reported already.
            with contextlib.suppress(Error):
                self.stop()


def record(path: str | os.PathLike[str] = "recording.lowtide", stacks: bool = False) -> Recording:
    """Records all memory events of every device to a file, from now on. Replaces an earlier recording there.

    The recording begins with the blocks that are allocated already. `lowtide replay`, `advise`, `report`, `leaks`,
    `diff` and `convert` read the file, also while it is written, and after the process was killed. In a job with
    several ranks (`RANK`, `WORLD_SIZE`), the name has the rank before its extension, as in `recording.rank3.lowtide`.

        with lowtide.record("step.lowtide"):
            step()

    With `stacks`, each request is recorded with its Python call stack, which needs Python 3.11. Threads without Python
    frames, such as PyTorch's backward threads, are recorded with their C++ stack.

    If `LOWTIDE_RECORD` is set, as by `lowtide record`, the whole process is recorded already. Then this records
    nothing, and a line on standard error says so.

    If the file cannot be written any more, a line on standard error says so, and the program goes on.

    Raises `StartedError` while another recording is in progress. Raises `Error` if the file cannot be created, or if
    there is a file that is no recording.
    """
    name = os.fspath(path)
    if whole := os.environ.get("LOWTIDE_RECORD"):
        print(f"lowtide: {name} is not written: {whole} (LOWTIDE_RECORD) has it all", file=sys.stderr, flush=True)
        return Recording(name, is_active=False)
    check(library().lowtide_record_start(path_to_c(name), stacks))
    return Recording(name)
