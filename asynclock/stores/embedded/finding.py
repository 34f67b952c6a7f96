"""Finds the embedded server of this user, and starts it if it does not run.

Its private folder (`home.py`) has three lock files besides the socket:

    door    a process locks it exclusively while it starts or finds the server
    users   each process that uses the server locks it shared, until it ends; then the kernel releases the lock
    alive   the keeper is the process that started the server; it locks this file exclusively while that server may
            live, waits until `users` is free, then ends the server and itself

Anybody may delete these files, so a lock counts only while its file is still the one at that path.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from asynclock._errors import ConfigError
from asynclock.stores.embedded import server as valkey
from asynclock.stores.embedded.keeper import AGAIN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from asynclock.stores.embedded.home import Home

_using: dict[Path, int] = {}  # folder -> descriptor of its `users`, locked shared until this process ends
_opened: set[int] = set()  # descriptors of other lock files, for a moment
_guard = threading.Lock()
_unforked = threading.RLock()  # held for moments in which no child may be forked; a signal handler may fork in one
_START_LIMIT = 10.0  # seconds


def _in_child() -> None:
    """A lock of a file is shared with the child. The one of `users` stays: the child is a user, too. The others belong
    to threads that the child does not have."""
    global _guard  # noqa: PLW0603 - a thread of the parent may have held it; here it would stay locked
    _guard = threading.Lock()
    _unforked.release()
    for each in _opened:
        os.close(each)  # not unlocked: that would end the lock of the parent
    _opened.clear()


os.register_at_fork(before=_unforked.acquire, after_in_parent=_unforked.release, after_in_child=_in_child)


@contextmanager
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


def running(home: Home) -> Path:
    """The socket of the user's server, which is started if it does not run. Blocks. Raises ConfigError if it cannot be
    started, ConnectionError if it does not answer within 10 s."""
    give_up = time.monotonic() + _START_LIMIT
    while True:
        folder, path = home.make(), home.socket
        with _guard, _open(folder / "door") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            _use(folder)
            if valkey.answers(path) and _uses(folder):
                return path
            if time.monotonic() > give_up:  # a keeper lives, so starting a server could make two
                raise ConnectionError(f"the embedded server does not answer: check {folder}")
            if not _is_kept(folder):
                _keep(folder, path)
                continue
        time.sleep(0.01)  # the server is stalled, or its keeper is about to end


def _use(folder: Path) -> None:
    """Lock its `users`, unless this process has done so."""
    while not _uses(folder):
        users = os.open(folder / "users", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(users, fcntl.LOCK_SH)  # waits while a keeper ends its server
        before, _using[folder] = _using.get(folder), users
        if before is not None:
            os.close(before)  # its file was deleted, so the keeper that looks at it ends its server


def _uses(folder: Path) -> bool:
    """Whether this process has locked the `users` that is there now."""
    try:
        return folder in _using and os.path.samestat(os.fstat(_using[folder]), (folder / "users").lstat())
    except FileNotFoundError:
        return False


def _is_kept(folder: Path) -> bool:
    """Whether a keeper lives. If so, its server may live too."""
    with _open(folder / "alive") as alive:
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def _keep(folder: Path, path: Path) -> None:
    """Start a keeper, and wait for its server. It may end without one (`AGAIN`)."""
    valkey.binary()  # checked here, so that ConfigError is raised in this process and not in the keeper
    with _unforked:  # Popen waits until all copies of a pipe are closed, and a child would have one
        keeper = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "asynclock.stores.embedded.keeper", str(folder)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # such as a zipapp
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal must not end the keeper
        )
    try:
        valkey.wait_ready(path, keeper)
    except ConfigError:
        if keeper.returncode != AGAIN:
            raise
    finally:
        keeper.returncode = 0  # the keeper outlives this process; Popen must not warn that it still runs
