"""Finds the embedded server of this user, and starts it if it does not run.

Its private folder (`home.py`) has three lock files besides the socket:

    door    a process locks it exclusively while it looks whether it must start the server, and while it starts it. Its
            text is the id of that process
    users   each process that uses the server locks it shared, until it ends; then the kernel releases the lock
    alive   the keeper is the process that started the server; it locks this file exclusively while that server may
            live, waits until `users` is free, then ends the server and itself. Its text is the ids of both

and a file `log`, in which the keeper and the server write.

Anybody may delete these files, so a lock counts only while its file is still the one at that path.

Any of these processes may be stopped (Ctrl-Z) while it holds a lock. So nothing here waits for a lock without a limit,
and a server that answers is found without the door.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asynclock._errors import ConfigError
from asynclock.stores.embedded import server as valkey
from asynclock.stores.embedded.keeper import AGAIN, ENDING, text_of
from asynclock.stores.forks import Kept, kept_of
from asynclock.stores.shared_calls import Call

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asynclock.stores.embedded.home import Home

_using: dict[Path, Kept] = {}  # folder -> its `users`, locked shared until this process ends or closes it
_keepers: set[int] = set()  # processes that this one has started, and has not waited for
_opened: set[int] = set()  # descriptors of other lock files, for a moment
_guard = threading.Lock()
_unforked = threading.RLock()  # held for moments in which no child may be forked; a signal handler may fork in one

START_LIMIT = 20.0
"""Seconds for the first answer of a server that this process starts."""

LIMIT = 30.0
"""Seconds for all else that a search waits for, one after the other. More than START_LIMIT: another process may be
starting the server."""

_PACKAGES = str(Path(__file__).absolute().parents[3])
"""The folder, or the zip file, that has asynclock."""

_KEEPER = "import sys; sys.path.append(sys.argv.pop(1)); from asynclock.stores.embedded.keeper import main; main()"

_PAUSES = (0.002, 0.05)
"""Seconds between two looks: the first pause and the longest."""


def _in_child() -> None:
    """A lock of a file is shared with the child. The one of `users` stays: the child is a user, too. The others belong
    to threads that the child does not have."""
    global _guard  # noqa: PLW0603 - a thread of the parent may have held it; here it would stay locked
    _guard = threading.Lock()
    _unforked.release()
    for each in _opened:
        os.close(each)  # not unlocked: that would end the lock of the parent
    _opened.clear()
    _keepers.clear()


os.register_at_fork(before=_unforked.acquire, after_in_parent=_unforked.release, after_in_child=_in_child)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[int]:
    """A lock file, for a block. At its end the lock is given back explicitly: a close leaves it to a child that was
    forked meanwhile, for as long as the child lives."""
    with _unforked:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        _opened.add(file)
    try:
        yield file
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
        with _unforked:
            _opened.discard(file)
            os.close(file)


class Obstacle(NamedTuple):
    """What a search waits for."""

    text: str  # "": for nothing
    progresses: bool = False
    """Whether the server starts or ends, and no process that has to do with it is known to be stopped. This takes its
    time."""


class Search(Call[Path]):
    """Finds the socket of the user's server, which is started if it does not run."""

    thread_name, purpose = "asynclock looks for the embedded server", "the search for the embedded server"

    def __init__(self, home: Home) -> None:
        super().__init__()
        self._home = home
        self._give_up = time.monotonic() + LIMIT
        self.obstacle = Obstacle("")  # as one value: event loops read it at any time
        self._starts = "the embedded server starts, and does not answer yet"

    def work(self) -> Path:
        """Blocks, with limits. Raises ConfigError if the server cannot be started, ConnectionError if it does not
        answer, or if another process holds a lock, for too long."""
        pause, longest = _PAUSES
        _reap()
        while True:
            try:
                folder, path = self._home.make(), self._home.socket
                if self._look(folder, path):
                    return path
            except FileNotFoundError as error:
                if not self._is_deleted(error):
                    raise
                self._wait_for("its folder was deleted", progresses=True)
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _is_deleted(self, error: FileNotFoundError) -> bool:
        """Whether somebody has deleted the folder, or a file in it. Another process may have made it again by now."""
        path = self._home.path
        return path.parent.exists() and str(error.filename).startswith(str(path))

    def _look(self, folder: Path, path: Path) -> bool:
        """Whether the server answers. Else it was started, or there is something to wait for."""
        if not self._enter(folder):
            return False
        server = _ids_in(folder / "alive")[1:]
        silent = f"{_named(server, 'the embedded server', _stopped(server))} does not answer"
        if not self.obstacle.text:  # else that of the last look counts until this one has ended
            self._say(silent)
        answer = valkey.probe(path)
        if answer is valkey.Probe.ANSWERS and _uses(folder):
            return True
        if answer is valkey.Probe.ABSENT:
            self._start_at_door(folder, path)
        else:
            self._wait_for(silent)
        return False

    def _enter(self, folder: Path) -> bool:
        """Become a user, so that the server does not end."""
        if _use(folder):
            return True
        self._wait_for_keeper(folder, "ends")
        return False

    def _start_at_door(self, folder: Path, path: Path) -> None:
        """Start the server, unless another process does that, or a keeper lives: that would make two servers."""
        with _open(folder / "door") as door:
            if not _lock(door, fcntl.LOCK_EX):
                ids = _ids_in(folder / "door")
                stopped = _stopped(ids)
                starter = _named(ids, "another program", stopped)
                self._wait_for(f"{starter} starts the embedded server", progresses=not stopped)
                return
            with contextlib.suppress(OSError):  # a full disk: the id is for messages only
                os.pwrite(door, text_of(os.getpid()), 0)
            if _is_kept(folder):
                self._wait_for_keeper(folder, "starts or ends")
                return
            self._wait_for(self._starts, progresses=True)
            if killed := _keep(folder, path):
                self._starts = f"the process that starts the embedded server was ended by {killed}"

    def _wait_for_keeper(self, folder: Path, does: str) -> None:
        ids = _ids_in(folder / "alive")
        stopped = _stopped(ids)
        keeper = _named(ids, "the process that keeps the embedded server", stopped)
        self._wait_for(f"{keeper} {does} it", progresses=not stopped)

    def _wait_for(self, hindrance: str, *, progresses: bool = False) -> None:
        """Raises ConnectionError once this has taken too long."""
        self._say(hindrance, progresses)
        if time.monotonic() > self._give_up:
            raise ConnectionError(self.obstacle.text)

    def _say(self, hindrance: str, progresses: bool = False) -> None:
        self.obstacle = Obstacle(f"{hindrance}: check {self._home.path}", progresses)


def _lock(file: int, how: int) -> bool:
    """Lock it now, if no other process has done so."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _ids_in(file: Path) -> list[int]:
    """The processes that have locked it, or did so before."""
    try:
        return [int(each) for each in file.read_bytes()[:100].split() if each.isdigit()]
    except FileNotFoundError:
        return []


def _stopped(ids: Sequence[int]) -> bool:
    """Whether the first of these processes was stopped, by Ctrl-Z or SIGSTOP (Linux; elsewhere it is not known)."""
    try:
        return Path(f"/proc/{ids[0]}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def _named(ids: Sequence[int], what: str, stopped: bool) -> str:
    """With the id of the first process, if it is known, and whether that is `stopped`."""
    if not ids:
        return what
    return f"{what} (process {ids[0]}{', which is stopped' if stopped else ''})"


def _use(folder: Path) -> bool:
    """Lock its `users`, unless this process has done so. False: a keeper ends its server just now."""
    with _guard:
        if _uses(folder):
            return True
        users = os.open(folder / "users", os.O_RDWR | os.O_CREAT, 0o600)
        is_locked = False
        try:
            is_locked = _lock(users, fcntl.LOCK_SH)
        finally:
            if not is_locked:
                os.close(users)
        if not is_locked:
            return False
        before, using = _using.get(folder), kept_of(users)
        _using[folder] = using
        # A program may have closed it, as a daemon closes all files. Then its number may be that of the new one.
        if before is not None and before != using and before.is_open:
            os.close(before.descriptor)  # its file was deleted, so the keeper that looks at it ends its server
        return _uses(folder)


def _uses(folder: Path) -> bool:
    """Whether this process has locked the `users` that is there now."""
    using = _using.get(folder)
    try:
        there = (folder / "users").lstat()
    except FileNotFoundError:
        return False
    return using is not None and using.is_open and (using.device, using.inode) == (there.st_dev, there.st_ino)


def _is_kept(folder: Path) -> bool:
    """Whether a keeper lives. If so, its server may live too."""
    with _open(folder / "alive") as alive:
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def keeper_command(folder: Path) -> list[str]:
    """It needs the standard library and asynclock. The folders of the program and its PYTHONPATH are left out, and the
    standard library comes first: they may have a `logging.py` or `redis.py`. Raises ConfigError if there is no
    server."""
    return [sys.executable, "-P", "-S", "-c", _KEEPER, _PACKAGES, str(folder), valkey.binary()]


def _keep(folder: Path, path: Path) -> str:
    """Start a keeper, and wait for its server. It may end without one (`AGAIN`). Returns the name of the signal that
    has ended it; "": none has."""
    log = folder / "log"
    with (  # a child forked in here would have modules whose import never ends, and a copy of the pipe Popen waits for
        _unforked,
        os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600), "wb") as output,
    ):
        keeper = subprocess.Popen(  # noqa: S603 - our own module
            keeper_command(folder),
            cwd="/",
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a Ctrl-C in the terminal must not end the keeper
        )
    try:
        valkey.wait_ready(path, keeper, START_LIMIT, log)
    except ConfigError:
        if keeper.returncode == AGAIN:
            return ""
        if -keeper.returncode not in ENDING:
            raise
        return signal.Signals(-keeper.returncode).name
    else:
        return ""
    finally:
        if keeper.returncode is None:
            _keepers.add(keeper.pid)
            keeper.returncode = 0  # the keeper outlives this process; Popen must not warn that it still runs


def _reap() -> None:
    """A keeper that has ended, and that nobody has waited for, is a zombie as long as this process lives."""
    for keeper in list(_keepers):
        ended = True
        with contextlib.suppress(ChildProcessError):  # the program has waited for it
            ended = os.waitpid(keeper, os.WNOHANG)[0] == keeper
        if ended:
            _keepers.discard(keeper)
