"""Where a thread's requests come from: what it has entered, in which order, and what of that is in force."""

import threading
from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack

from ._errors import Error
from ._install import check_served
from ._library import Status, check, library


class Inside(ContextDecorator):
    """While a thread is in it, its requests come from a region, or from none. Many may be in it, and one twice."""

    def __init__(self, tag: bytes | None, kind: int) -> None:
        self._tag, self._kind = tag, kind

    def __enter__(self) -> None:
        check_served()
        _THREAD.enter(self)

    def __exit__(self, *_: object) -> None:
        _THREAD.leave(self)

    def put_in_force(self) -> ExitStack:
        """Lets the thread's requests come from it. Returns what ends that."""
        check(library().lowtide_region_enter(self._tag, self._kind))
        stack = ExitStack()
        stack.callback(_leave)
        return stack


class _Thread(threading.local):
    """What a thread has entered, the innermost last, and has that in force.

    Generators and coroutines leave in another order than they entered, and garbage may be collected at any time, with
    a generator that leaves then. So a change is only asked for, and `_settle` makes it, and goes step by step from what
    is in force to what is entered.
    """

    def __init__(self) -> None:
        self._asked: list[Callable[[], None]] = []
        self._entered: list[Inside] = []
        # With what ends each.
        self._in_force: list[tuple[Inside, ExitStack]] = []
        self._is_stepping = False

    def enter(self, inside: Inside) -> None:
        self._asked.append(lambda: self._entered.append(inside))
        try:
            self._settle()
        except BaseException:
            self.leave(inside)
            raise

    def leave(self, inside: Inside) -> None:
        self._asked.append(lambda: self._remove(inside))
        self._settle()

    def forget(self) -> None:
        """Takes all that is entered for being in force, and for having nothing to end."""
        self._in_force = [(inside, ExitStack()) for inside in self._entered]

    def _remove(self, inside: Inside) -> None:
        places = [place for place, other in enumerate(self._entered) if other is inside]
        if not places:
            raise Error("a region is left by the thread that entered it")
        del self._entered[places[-1]]

    def _settle(self) -> None:
        """Makes the changes, and has in force what is entered then. Raises the first error, once all else is done."""
        if self._is_stepping:
            # What is asked for within a step is seen by the loop around that.
            return
        errors: list[BaseException] = []
        is_settled = False
        while self._asked or not is_settled:
            try:
                is_settled = self._step()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _step(self) -> bool:
        """Makes a change, ends what should not be in force, or lets one be that should. Returns whether all is done."""
        self._is_stepping = True
        try:
            in_force = [inside for inside, _ in self._in_force]
            if self._asked:
                self._asked.pop(0)()
            elif in_force == self._entered:
                return True
            elif in_force == self._entered[: len(in_force)]:
                next_ = self._entered[len(in_force)]
                end = ExitStack()
                # Even where it fails: it is not tried again.
                self._in_force.append((next_, end))
                end.push(next_.put_in_force())
            else:
                _, end = self._in_force.pop()
                end.close()
            return False
        finally:
            self._is_stepping = False


_THREAD = _Thread()


def _leave() -> None:
    status = library().lowtide_region_leave()
    if status == Status.FORKED:
        # A process that was forked from within has no CUDA, and nothing to leave.
        _THREAD.forget()
    else:
        check(status)
