"""Safe writing of files, and directories that no other user can change.

A file is created under a random name, with access for this user only, and then renamed. Only a regular file of this
user is replaced. Code is loaded only from directories that no other user can change.
"""

import ctypes
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_SEARCH = stat.S_IXGRP | stat.S_IXOTH
# The limit of Linux.
_LINKS_MAX = 40
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# From <linux/magic.h>.
_PROC_SUPER_MAGIC = 0x9FA0


class UnsafeError(OSError):
    """Another user may have changed a file or directory. The message is one line, which begins with the path."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} {why}")


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes `content` to the file at `path`, with access for this user only.

    Raises `UnsafeError` if anything but a regular file of this user is there.
    """
    path = Path(path)
    name = path.name or "."
    with _opened(path.parent) as (directory, _):
        temporary = f".lowtide-{secrets.token_hex(16)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600, dir_fd=directory)
        try:
            with open(descriptor, "wb") as file:
                # NFS may map root's files to another user.
                users = {os.geteuid(), os.fstat(descriptor).st_uid}
                with suppress(FileNotFoundError):
                    there = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    _check_file(path, there, users, ": choose another name")
                file.write(content)
                file.flush()
                # After a power failure, the path has the old file or all of the new one.
                os.fsync(file.fileno())
            os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            os.unlink(temporary, dir_fd=directory)
            raise


def make_directory(path: str | os.PathLike[str]) -> None:
    """Creates a directory and its missing parents, with access for this user only."""
    with _opened(Path(path), is_made=True):
        pass


def private_directory(path: Path) -> Path:
    """Returns a directory's path without symbolic links. No other user can change anything in that path.

    Creates missing directories, with access for this user only. Raises `UnsafeError` if another user owns a directory
    of the path, or may write to it. Parents with the sticky bit, such as `/tmp`, are allowed: nobody can rename another
    user's files there.
    """
    with _opened(path, is_private=True, is_made=True) as (_, way):
        return way


def read_own(path: Path) -> bytes | None:
    """Returns the content of a file that only this user or root may write to; `None` if there is no file.

    Raises `UnsafeError` if another user owns the file or may write to it.
    """
    # Do not block on a FIFO that another user may have put there.
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
    """Holds the lock of a file in a private directory. Creates the file if it is missing."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        # On a file system without locks, two processes may enter at once.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _opened(path: Path, is_private: bool = False, is_made: bool = False) -> Iterator[tuple[int, Path]]:
    """Opens a directory. Follows no symbolic link that another user may have created.

    Returns its descriptor, which stays valid if others rename it, and its path without symbolic links.
    """
    here, way = os.open("/", _DIRECTORY), Path("/")
    try:
        left = list(reversed((Path.cwd() / path).parts[1:]))
        links, is_closed = 0, False
        while left:
            step = way / left.pop()
            there = _look(here, step.name, is_made)
            if not stat.S_ISLNK(there.st_mode):
                if is_private:
                    _check_planted(step, there, os.stat(here))
                here, way = _go(here, step.name, os.O_NOFOLLOW), step
            elif (target := _read_link(here, step)) is None:
                # Other users may reach this directory by another path.
                here, way, is_closed = _go(here, step.name), step, False
            else:
                links += 1
                if links > _LINKS_MAX:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(step))
                if target.is_absolute():
                    here, way, is_closed = _go(here, "/"), Path("/"), False
                left.extend(reversed(target.parts[target.is_absolute() :]))
            if is_private:
                found = os.stat(here)
                is_closed = step.name != ".." and (is_closed or not found.st_mode & _OTHERS_SEARCH)
                _check_private(way, found, is_closed, may_be_shared=bool(left))
        yield here, way
    finally:
        os.close(here)


def _look(here: int, name: str, is_made: bool) -> os.stat_result:
    """Returns the status of a name in a directory. With `is_made`, creates a directory if the name is missing."""
    try:
        return os.stat(name, dir_fd=here, follow_symlinks=False)
    except FileNotFoundError:
        if not is_made:
            raise
    # Another process may have created it first.
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=here)
    return os.stat(name, dir_fd=here, follow_symlinks=False)


def _go(here: int, name: str, flags: int = 0) -> int:
    """Opens a directory inside another one, and closes the outer one."""
    there = os.open(name, _DIRECTORY | flags, dir_fd=here)
    os.close(here)
    return there


def _read_link(here: int, step: Path) -> Path | None:
    """Returns the target of a symbolic link; `None` in `/proc`, whose links do not follow their text."""
    link = os.open(step.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
    try:
        _check_planted(step, os.stat(link), os.stat(here))
        return None if _is_of_processes(here) else Path(os.readlink("", dir_fd=link))
    finally:
        os.close(link)


def _is_of_processes(directory: int) -> bool:
    """Returns whether a directory is in a `/proc` file system."""
    # The kernel's `struct statfs` is shorter, and begins with the file system's type.
    found = (ctypes.c_long * 64)()
    if ctypes.CDLL(None, use_errno=True).fstatfs(directory, found):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found[0] == _PROC_SUPER_MAGIC


def _check_planted(step: Path, there: os.stat_result, directory: os.stat_result) -> None:
    may_be_planted = directory.st_mode & _OTHERS_WRITE or directory.st_uid not in _trusted()
    if may_be_planted and there.st_uid not in (0, os.geteuid()):
        raise UnsafeError(step, f"is another user's (uid {there.st_uid}), in a directory that others may write to")


def _check_private(directory: Path, found: os.stat_result, is_closed: bool, may_be_shared: bool) -> None:
    # A parent directory may belong to a user without an id in this container.
    if found.st_uid not in (_trusted() if may_be_shared else (0, os.geteuid())):
        raise UnsafeError(directory, f"belongs to another user (uid {found.st_uid})")
    is_safe = is_closed or (may_be_shared and found.st_mode & stat.S_ISVTX)
    if found.st_mode & _OTHERS_WRITE and not is_safe:
        raise UnsafeError(directory, "may be written to by others")


def _check_file(path: Path, there: os.stat_result, users: set[int], advice: str = "") -> None:
    if not stat.S_ISREG(there.st_mode):
        raise UnsafeError(path, f"is no regular file{advice}")
    if there.st_uid not in users:
        raise UnsafeError(path, f"belongs to another user (uid {there.st_uid}){advice}")


def _trusted() -> set[int]:
    """Returns the users that may own the parents of a private directory: this user and root.

    In a container with a user namespace, the host's root has the overflow id, as all users without an id there.
    """
    users = {0, os.geteuid()}
    with suppress(OSError):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
            users.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return users
