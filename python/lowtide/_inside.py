"""The regions and `disable` contexts that a thread has entered, in order."""

import threading
from collections.abc import Callable
from contextlib import ContextDecorator

from ._errors import Error, first_line, report_line
from ._install import check_served
from ._library import Status, check, library

End = Callable[[], object]
"""A function that leaves what was entered."""


class Inside(ContextDecorator):
    """A context that takes a thread's requests from a region, or from none. Many threads may enter it, also twice."""

    def __init__(self, tag: bytes | None, kind: int) -> None:
        self._tag, self._kind = tag, kind

    def __enter__(self) -> None:
        check_served()
        _THREAD.enter(self)

    def __exit__(self, *_: object) -> None:
        _THREAD.leave(self)

    def put_in_force(self) -> End:
        """Enters the region and returns the function that leaves it. Changes nothing if it fails."""
        check(library().lowtide_region_enter(self._tag, self._kind))
        return _leave


class _Entry:
    """A context that a thread has entered."""

    def __init__(self, inside: Inside) -> None:
        self.inside = inside
        self.end: End = _nothing


class _Thread(threading.local):
    """The contexts that a thread has entered, all of them in force, the innermost last.

    Generators and coroutines may leave in another order than they entered. Then the later entries are ended and put in
    force again. The garbage collector may run at any time, also in the middle of this, and end a generator that leaves
    a region. Such an exit waits until the operation under way has ended. A context that a finalizer itself enters and
    leaves takes effect at once.
    """

    def __init__(self) -> None:
        self._entered: list[_Entry] = []
        # The number of entries that must not change while an operation is under way.
        self._kept = 0
        # The entries whose exit waits for that operation.
        self._late: list[_Entry] = []
        # A forked child has no CUDA: there is nothing to put in force or to end.
        self.is_forked = False

    def enter(self, inside: Inside) -> None:
        kept, entry = self._kept, _Entry(inside)
        try:
            self._kept = len(self._entered) + 1
            self._entered.append(entry)
            entry.end = inside.put_in_force()
        except BaseException:
            self._entered = [other for other in self._entered if other is not entry]
            raise
        finally:
            self._kept = kept
        self._leave_late()

    def leave(self, inside: Inside) -> None:
        kept = self._kept
        try:
            self._kept = len(self._entered)
            places = [place for place, entry in enumerate(self._entered) if entry.inside is inside]
            if not places:
                raise Error("a region is left by the thread that entered it")
            if places[-1] >= kept:
                self._remove(places[-1])
            else:
                self._late.append(self._entered[places[-1]])
        finally:
            self._kept = kept
        self._leave_late()

    def _remove(self, place: int) -> None:
        """Ends an entry. Raises the first error, once all others are in force."""
        entry, *later = self._entered[place:]
        error: BaseException | None = None
        for each in (*reversed(later), entry):
            try:
                each.end()
            except BaseException as failure:
                error = error or failure
        self._entered.remove(entry)
        self._kept -= 1
        for each in later:
            each.end = _nothing
            try:
                if not self.is_forked:
                    each.end = each.inside.put_in_force()
            except BaseException as failure:
                error = error or failure
        try:
            if error is not None:
                raise error
        finally:
            # The exception refers to this frame: break the reference cycle.
            del error

    def _leave_late(self) -> None:
        while self._late and self._kept == 0:
            entry = self._late.pop()
            try:
                self._kept = len(self._entered)
                self._remove(self._entered.index(entry))
            except Exception as error:
                # The code that runs now did not cause this error.
                report_line(f"a generator that was collected has left a region: {first_line(error)}")
            finally:
                self._kept = 0


def _leave() -> None:
    status = library().lowtide_region_leave()
    if status == Status.FORKED:
        # A process that was forked from within has no CUDA.
        _THREAD.is_forked = True
    else:
        check(status)


def _nothing() -> None:
    pass


_THREAD = _Thread()
