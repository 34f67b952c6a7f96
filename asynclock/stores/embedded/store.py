"""`embedded:`, one server for all processes of a user on one machine. The first client starts it.

Its private folder (in /tmp, or in $ASYNCLOCK_EMBEDDED_DIR) has three lock files besides the socket:

    door    a process locks it exclusively while it starts or finds the server
    users   each process that uses the server locks it shared, until it ends; then the kernel releases the lock
    alive   the keeper is the process that started the server; it locks this file exclusively while that server may
            live, waits until `users` is free, then ends the server and itself

`embedded:name` is another server, separate from the first.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from redis.asyncio.connection import UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from asynclock._errors import ConfigError
from asynclock.stores.embedded import server as valkey
from asynclock.stores.embedded.home import Home
from asynclock.stores.redis.connecting import followed
from asynclock.stores.redis.identity import Identity
from asynclock.stores.redis.node import RedisNode

if TYPE_CHECKING:
    from pathlib import Path

    from redis.asyncio.connection import AbstractConnection

    from asynclock.stores.port import NodeConfig

_using: dict[Path, int] = {}  # folder -> descriptor of its `users`, locked shared until this process ends
_guard = threading.Lock()
_START_LIMIT = 10.0  # seconds


def _renew_guard() -> None:
    global _guard  # noqa: PLW0603 - a lock that another thread held during the fork stays locked in the child
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_renew_guard)


class EmbeddedStore:
    """A server of this user. The first process starts it; it ends after the last process that uses it."""

    clock = None
    thread_safe = True

    def __init__(self, url: str = "embedded:") -> None:
        name = url.partition(":")[2].strip("/") or "default"
        if not re.fullmatch(r"[\w.-]{1,32}", name):
            raise ConfigError(
                "an embedded server's name, after 'embedded:', is 1 to 32 letters, digits, '.', '_' and '-'"
            )
        self.run_id = ""
        self.replaced = "", 0.0
        self.identity = Identity()
        self.label = f"embedded:{name}"
        self._home = Home(name)

    def __repr__(self) -> str:
        return f"<EmbeddedStore {self.label}>"

    def open(self, config: NodeConfig) -> RedisNode:
        return RedisNode(self, config)

    async def dial(self) -> AbstractConnection:
        path = await asyncio.get_running_loop().run_in_executor(None, running, self._home)
        return followed(UnixDomainSocketConnection)(path=str(path), protocol=2, retry=Retry(NoBackoff(), 0))


def running(home: Home) -> Path:
    """The socket of the user's server, which is started if it does not run. Blocks. Raises ConfigError if it cannot be
    started, ConnectionError if it does not answer within 10 s."""
    folder, path = home.make(), home.socket
    with _guard, (folder / "door").open("w") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        if folder not in _using:
            users = os.open(folder / "users", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(users, fcntl.LOCK_SH)  # waits while a keeper ends its server
            _using[folder] = users
        give_up = time.monotonic() + _START_LIMIT
        while not valkey.answers(path):
            if not _is_kept(folder):
                _keep(folder, path)
            elif time.monotonic() > give_up:  # a keeper lives, so starting a server could make two
                raise ConnectionError(f"the embedded server does not answer: check {folder}")
            else:  # the server is stalled, or its keeper is about to end
                time.sleep(0.01)
    return path


def _is_kept(folder: Path) -> bool:
    """Whether a keeper lives. If so, its server may live too."""
    with (folder / "alive").open("w") as alive:
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def _keep(folder: Path, path: Path) -> None:
    valkey.binary()  # checked here, so that ConfigError is raised in this process and not in the keeper
    keeper = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", "asynclock.stores.embedded.keeper", str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # such as the zip file of a zipapp
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal must not end the keeper
    )
    valkey.wait_ready(path, keeper)
    keeper.returncode = 0  # the keeper outlives this process; Popen must not warn that it still runs
