"""Files that lowtide writes, and directories that nobody else can change.

A new file is new: it is created under a name that nobody can guess, for this user alone, and renamed. Only a regular
file of this user is replaced. Code is loaded only from directories that nobody else can change.
"""

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# As many as Linux follows.
_LINKS_MAX = 40


class UnsafeError(OSError):
    """Another user may have put something there. The message is one line, which begins with the path."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} {why}")


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Makes `content` the file at `path`, for this user alone.

    Raises `UnsafeError` where anything but a regular file of this user is there.
    """
    path = Path(path)
    directory = _follow(path.parent)
    target = directory / path.name
    with suppress(FileNotFoundError):
        _check_file(target, os.lstat(target), {os.geteuid()}, ": choose another name")
    descriptor, temporary = tempfile.mkstemp(prefix=".lowtide-", suffix=".tmp", dir=directory)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            # A machine that loses its power afterwards has the old file, or all of the new one.
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def make_directory(path: str | os.PathLike[str]) -> None:
    """Makes a directory and those above it that are missing, for this user alone."""
    _follow(Path(path), is_made=True)


def private_directory(path: Path) -> Path:
    """Returns a directory without symbolic links in its path, once nobody else can change anything on the way to it.

    Whatever is missing is made, for this user alone. Raises `UnsafeError` where another user owns or may write to one
    of its directories; `/tmp` and its like may be among them, in which nobody renames what is another's.
    """
    return _follow(path, is_private=True, is_made=True)


def read_own(path: Path) -> bytes | None:
    """Returns what is in a file of this user, or of root, that nobody else may write to; `None` if none is there.

    Raises `UnsafeError` where the file is another's.
    """
    # Nothing that is planted is waited for.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        _check_file(path, os.lstat(path), {os.geteuid(), 0})
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        there = os.fstat(descriptor)
        _check_file(path, there, {os.geteuid(), 0})
        if there.st_mode & _OTHERS_WRITE:
            raise UnsafeError(path, "may be written to by others")
        return file.read()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file in a private directory, which is made if it is missing."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        # On a file system without locks two may come in at once.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _follow(path: Path, is_private: bool = False, is_made: bool = False) -> Path:
    """Returns a directory without symbolic links in its path, past none that another user may have planted."""
    here = Path("/")
    found = os.lstat(here)
    left = list(reversed((Path.cwd() / path).parts[1:]))
    links = 0
    while left:
        step = here / left.pop()
        try:
            there = os.lstat(step)
        except FileNotFoundError:
            if not is_made:
                raise
            # Another process may be first.
            with suppress(FileExistsError):
                os.mkdir(step, 0o700)
            there = os.lstat(step)
        is_link = stat.S_ISLNK(there.st_mode)
        may_be_planted = found.st_mode & _OTHERS_WRITE and there.st_uid not in (0, os.geteuid())
        if may_be_planted and (is_link or is_private):
            raise UnsafeError(step, f"is another user's (uid {there.st_uid}), in a directory that others may write to")
        if is_link:
            links += 1
            if links > _LINKS_MAX:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(step))
            target = Path(os.readlink(step))
            here = Path("/") if target.is_absolute() else here
            left.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))
        else:
            here = here.parent if step.name == ".." else step
        # What is mounted there, if something is.
        found = os.stat(os.path.join(here, "."))
        if is_private:
            _check_private(here, found, may_be_shared=bool(left))
    return here


def _check_private(directory: Path, found: os.stat_result, may_be_shared: bool) -> None:
    if found.st_uid not in _trusted():
        raise UnsafeError(directory, f"belongs to another user (uid {found.st_uid})")
    if found.st_mode & _OTHERS_WRITE and not (may_be_shared and found.st_mode & stat.S_ISVTX):
        raise UnsafeError(directory, "may be written to by others")


def _check_file(path: Path, there: os.stat_result, users: set[int], advice: str = "") -> None:
    if not stat.S_ISREG(there.st_mode):
        raise UnsafeError(path, f"is no regular file{advice}")
    if there.st_uid not in users:
        raise UnsafeError(path, f"belongs to another user (uid {there.st_uid}){advice}")


def _trusted() -> set[int]:
    """Returns whose directories lie on the way to a private one: this user's and root's.

    In a container without root, the machine's root is among those users who have no number of their own there.
    """
    users = {0, os.geteuid()}
    with suppress(OSError):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
            users.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return users
