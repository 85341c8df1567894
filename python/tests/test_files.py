"""Files where others may write, and the cache from which code is loaded.

As root the attacker is the user `nobody`. Any other user plants for himself what is refused whoever owns it.
"""

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide import _files

IS_ROOT = os.geteuid() == 0
NOBODY = 65534

as_root = pytest.mark.skipif(not IS_ROOT, reason="only root can be two users")

# Everybody's, with and without the sticky bit, and a group's.
SHARED = [0o777, 0o1777, 0o775]

SHIM = """
    extern "C" {{
    const char *lowtide_torch_install() {{ return nullptr; }}
    bool lowtide_torch_is_installed() {{ return {is_ours}; }}
    int lowtide_torch_pause(const char *, bool) {{ return 0; }}
    int lowtide_torch_resume(const char *) {{ return 0; }}
    const char *lowtide_torch_change_error() {{ return ""; }}
    }}
"""

# Loads a shim that compiles without PyTorch, and says whether it is that one.
LOAD = """
    import sys
    from lowtide.torch import build

    build.library = build.prebuilt = lambda: None
    build._plan = lambda: (["-shared", "-fPIC", sys.argv[1]], build.cache_directory() / "torch-1" / "shim.so")
    try:
        print("ours" if build.build().lowtide_torch_is_installed() else "planted")
    except build.BuildError as error:
        print(error)
"""


def attack(directory: Path, *command: str) -> None:
    """Runs a command of the attacker's in a directory."""
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if IS_ROOT else {}
    subprocess.run(command, cwd=directory, check=True, **user)  # type: ignore[call-overload]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that others may pass, as pytest's own is not."""
    directory = Path(tempfile.mkdtemp(prefix="lowtide-files-"))
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(params=SHARED, ids=lambda mode: f"{mode:o}")
def shared(request: pytest.FixtureRequest, place: Path) -> Path:
    """A directory that others may write to."""
    directory = place / "shared"
    directory.mkdir()
    if IS_ROOT:
        os.chown(directory, -1, NOBODY)
    directory.chmod(request.param)
    return directory


@pytest.fixture
def sources(place: Path) -> tuple[Path, Path]:
    """The source of a shim, and another one compiled."""
    ours, planted, built = (place / name for name in ("ours.cpp", "planted.cpp", "planted.so"))
    ours.write_text(textwrap.dedent(SHIM).format(is_ours="true"))
    planted.write_text(textwrap.dedent(SHIM).format(is_ours="false"))
    subprocess.run(["c++", "-shared", "-fPIC", planted, "-o", built], check=True)
    built.chmod(0o644)
    return ours, built


def load(cache: Path, source: Path) -> str:
    """Returns which shim is loaded with that cache, or why none is."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    program = textwrap.dedent(LOAD)
    done = subprocess.run(
        [sys.executable, "-c", program, source],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return line


def plant(directory: Path, built: Path) -> None:
    """Puts a whole shim of the attacker's where one would be, with what is kept beside it."""
    checksum = hashlib.sha256(built.read_bytes()).hexdigest()
    script = 'umask 022; mkdir -p lowtide/torch-1 && cp "$0" lowtide/torch-1/shim.so'
    attack(directory, "sh", "-c", f"{script} && printf {checksum} > lowtide/torch-1/shim.so.sha256", str(built))


def test_a_shim_that_another_user_planted_is_not_loaded(shared: Path, sources: tuple[Path, Path]) -> None:
    if not IS_ROOT and shared.stat().st_mode & stat.S_ISVTX:
        pytest.skip("what this user plants is this user's own there")
    ours, built = sources
    plant(shared, built)
    assert load(shared, ours).startswith("the shim cannot be kept (")


@as_root
def test_a_cache_is_not_where_another_user_leads(shared: Path, sources: tuple[Path, Path]) -> None:
    ours, built = sources
    attack(shared, "mkdir", "theirs")
    plant(shared / "theirs", built)
    attack(shared, "ln", "-s", "theirs/lowtide", "lowtide")
    assert load(shared, ours).startswith("the shim cannot be kept (")
    # Nor is it where the way there is another user's.
    attack(shared, "mkdir", "way")
    assert load(shared / "way" / "cache", ours).startswith("the shim cannot be kept (")
    (shared / "way").rmdir()


def test_a_cache_of_the_users_own_is_used_where_nobody_can_rename_it(shared: Path, sources: tuple[Path, Path]) -> None:
    ours, _ = sources
    cache = shared / "cache"
    cache.mkdir(mode=0o755)
    if shared.stat().st_mode & stat.S_ISVTX:
        for _ in range(2):
            assert load(cache, ours) == "ours"
        kept = cache / "lowtide" / "torch-1"
        assert [stat.S_IMODE(path.stat().st_mode) for path in (cache / "lowtide", kept)] == [0o700, 0o700]
        assert sorted(path.name for path in kept.iterdir()) == ["lock", "shim.so", "shim.so.sha256"]
        assert {stat.S_IMODE(path.stat().st_mode) for path in kept.iterdir()} == {0o600}
    else:
        expected = f"the shim cannot be kept ({shared} may be written to by others): set XDG_CACHE_HOME to a directory "
        assert load(cache, ours) == expected + "to which only you may write, below none of another user's"


def test_a_cache_may_be_a_groups_where_its_group_cannot_get_to_it(
    shared: Path, place: Path, sources: tuple[Path, Path]
) -> None:
    ours, _ = sources
    cache = shared / "cache"
    cache.mkdir()
    cache.chmod(0o775)
    place.chmod(0o700)
    assert load(cache, ours) == "ours"
    for mode in (0o710, 0o701):
        place.chmod(mode)
        assert "may be written to by others" in load(cache, ours)
    place.chmod(0o700)
    # What a way leads out of again protects nothing, and neither does a process's own directory.
    (place / "closed").mkdir(mode=0o700)
    place.chmod(0o711)
    way = place / "closed" / ".." / shared.name / "cache"
    assert "may be written to by others" in load(way, ours)
    descriptor = os.open(cache, os.O_RDONLY)
    try:
        with pytest.raises(_files.UnsafeError, match="may be written to by others"):
            _files.private_directory(Path(f"/proc/{os.getpid()}/fd/{descriptor}"))
    finally:
        os.close(descriptor)


def test_a_shim_that_is_not_as_it_was_built_is_not_loaded(place: Path, sources: tuple[Path, Path]) -> None:
    ours, built = sources
    assert load(place, ours) == "ours"
    shim = place / "lowtide" / "torch-1" / "shim.so"
    for contents in (built.read_bytes(), b"", bytes(1000)):
        shim.unlink()
        shim.write_bytes(contents)
        assert load(place, ours) == "ours", "it was built anew"
    shim.unlink()
    shim.symlink_to(built)
    assert "shim.so is no regular file" in load(place, ours)
    shim.unlink()
    # One that waited for a writer would wait for ever.
    os.mkfifo(shim)
    assert "shim.so is no regular file" in load(place, ours)
    shim.unlink()
    shim.write_bytes(built.read_bytes())
    shim.chmod(0o666)
    assert "shim.so may be written to by others" in load(place, ours)
    if IS_ROOT:
        shim.chmod(0o644)
        os.chown(shim, NOBODY, NOBODY)
        assert "shim.so belongs to another user (uid 65534)" in load(place, ours)


def test_a_link_of_the_users_own_leads_to_a_cache(place: Path, sources: tuple[Path, Path]) -> None:
    ours, _ = sources
    (place / "disk").mkdir()
    (place / "home").mkdir()
    (place / "home" / "cache").symlink_to("../disk")
    assert load(place / "home" / "cache", ours) == "ours"
    assert (place / "disk" / "lowtide" / "torch-1" / "shim.so").exists()
    (place / "round").symlink_to("round")
    assert "Too many levels of symbolic links" in load(place / "round", ours)


def write_elsewhere(path: Path) -> str:
    """Returns why a file cannot be written, by a process that is ended if it waits for somebody."""
    program = "import sys; from pathlib import Path; from lowtide import _files; _files.write(sys.argv[1], b'new')"
    done = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, timeout=120, check=False
    )
    return done.stderr.splitlines()[-1].removeprefix("lowtide._files.UnsafeError: ") if done.returncode else "written"


def test_what_is_planted_is_not_written_to(shared: Path, place: Path) -> None:
    victim = place / "victim"
    victim.write_text("as it was")
    plants = [("ln -s ../victim file", "is no regular file"), ("ln -s ../new file", "is no regular file")]
    plants.append(("mkfifo -m 666 file", "is no regular file"))
    if IS_ROOT:
        plants.append((": > file; chmod 666 file", "belongs to another user (uid 65534)"))
    for script, why in plants:
        attack(shared, "sh", "-c", script)
        assert write_elsewhere(shared / "file") == f"{shared / 'file'} {why}: choose another name"
        (shared / "file").unlink()
    assert victim.read_text() == "as it was"
    assert sorted(path.name for path in place.iterdir()) == ["shared", "victim"]
    assert list(shared.iterdir()) == []


@as_root
def test_a_file_is_replaced_where_the_file_system_gives_it_to_another(place: Path) -> None:
    """As NFS does with the files of a machine's root."""
    directory = place / "given"
    directory.mkdir()
    directory.chmod(0o777)
    program = """
    import ctypes, sys
    from pathlib import Path
    from lowtide import _files
    for content in (b"old", b"new"):
        ctypes.CDLL(None).setfsuid(65534)
        _files.write(sys.argv[1], content)
    """
    file = directory / "file"
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), file], check=True, timeout=120)
    assert (file.read_bytes(), file.stat().st_uid) == (b"new", NOBODY)
    assert "belongs to another user (uid 65534)" in write_elsewhere(file)
    assert os.listdir(directory) == ["file"]


def test_a_new_file_is_for_its_user_alone(shared: Path) -> None:
    path = shared / "file"
    path.write_text("as it was")
    path.chmod(0o644)
    os.link(path, shared / "other")
    _files.write(path, b"new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (shared / "other").read_text() == "as it was"
    assert sorted(name.name for name in shared.iterdir()) == ["file", "other"]


@as_root
def test_a_file_is_not_written_where_another_user_leads(shared: Path, place: Path) -> None:
    (place / "home").mkdir()
    attack(shared, "ln", "-s", "../home", "way")
    with pytest.raises(_files.UnsafeError, match=r"way is another user's \(uid 65534\), in a directory that others"):
        _files.write(shared / "way" / "file", b"new")
    assert list((place / "home").iterdir()) == []


@as_root
def test_a_directory_of_another_users_leads_nowhere(place: Path) -> None:
    (place / "home").mkdir()
    theirs = place / "theirs"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, NOBODY, NOBODY)
    attack(theirs, "ln", "-s", "../home", "way")
    with pytest.raises(_files.UnsafeError, match=r"way is another user's \(uid 65534\), in a directory that others"):
        _files.write(theirs / "way" / "file", b"new")
    assert list((place / "home").iterdir()) == []


@pytest.mark.parametrize("descriptors", ["/dev/fd", "/proc/self/fd", "/proc/thread-self/fd"])
def test_a_link_of_a_process_leads_where_the_kernel_says(place: Path, descriptors: str) -> None:
    """The text of one may be the path of something else."""
    opened = []
    for name in ("gone", "gone (deleted)", "there"):
        (place / name).mkdir()
        opened.append(os.open(place / name, os.O_RDONLY))
    gone, _, there = opened
    (place / "gone").rmdir()
    with pytest.raises(FileNotFoundError):
        _files.write(f"{descriptors}/{gone}/file", b"new")
    assert list((place / "gone (deleted)").iterdir()) == []
    _files.write(f"{descriptors}/{there}/file", b"new")
    assert (place / "there" / "file").read_bytes() == b"new"
    for descriptor in opened:
        os.close(descriptor)


def test_a_directory_that_is_renamed_meanwhile_stays_the_same(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is that another user replaces by a link once it was looked at."""
    for name in ("mine", "victim"):
        (place / name).mkdir()
    look = _files._check_file

    def replaced(path: Path, *rest: object) -> None:
        look(path, *rest)  # type: ignore[arg-type]
        (place / "mine").rename(place / "moved")
        (place / "mine").symlink_to("victim")

    (place / "mine" / "file").touch()
    monkeypatch.setattr(_files, "_check_file", replaced)
    _files.write(place / "mine" / "file", b"new")
    assert (place / "moved" / "file").read_bytes() == b"new"
    assert list((place / "victim").iterdir()) == []


@as_root
def test_a_directory_is_made_for_its_user_alone(shared: Path, place: Path) -> None:
    _files.make_directory(shared / "backups" / "deeper")
    _files.make_directory(shared / "backups" / "deeper")
    for made in (shared / "backups", shared / "backups" / "deeper"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    attack(shared, "ln", "-s", "..", "way")
    with pytest.raises(_files.UnsafeError, match="way is another user's"):
        _files.make_directory(shared / "way" / "backups")
    assert not (place / "backups").exists()
    (place / "file").touch()
    with pytest.raises(NotADirectoryError):
        _files.make_directory(place / "file")
