"""Real servers for the tests: started, frozen, killed and restarted by them.

Their source is the first of these: $ASYNCLOCK_TEST_URLS (shared tests only: the tests must not kill those), containers
of $ASYNCLOCK_TEST_IMAGE, the program named by $ASYNCLOCK_TEST_SERVER, the embedded wheel's, one on the PATH, and
containers of redis:7-alpine (containers.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from asynclock._errors import ConfigError
from asynclock.stores.embedded import server as valkey
from tests.support.containers import Container, image, server_program
from tests.support.tied import start_tied

Running = subprocess.Popen[bytes] | Container
"""A server: a process of this machine, or a container."""
START = 30.0  # seconds in which it answers


def run(program: Path | None, *arguments: str, tied: bool = False) -> Running:
    """That program with these arguments, or a container whose server has them. None: the program that is tried. `tied`:
    the process ends with the thread that called this (Linux)."""
    if chosen := image():
        return Container(chosen, *arguments)
    start = start_tied if tied else subprocess.Popen
    return start(
        [str(program or server_program()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def freeze(server: Running) -> None:
    """Return once it runs no more."""
    server.send_signal(signal.SIGSTOP)
    if not isinstance(server, Container):
        os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)  # it may run on for a moment


class Server:
    """One server on a unix socket of its own."""

    def __init__(self, folder: Path, name: str, *options: str) -> None:
        self.path = folder / f"{name}.sock"
        self.options = options
        self.process = self._start()

    def ready(self) -> Server:
        """Return once it answers."""
        try:
            valkey.wait_ready(self.path, self.process, START)
        except (ConfigError, OSError) as error:
            if isinstance(self.process, Container):
                error.add_note(self.process.logs())
            raise
        return self

    def _start(self) -> Running:
        self.path.unlink(missing_ok=True)
        return run(None, *valkey.arguments(self.path, *self.options), tied=True)

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def cli(self, **kwargs: Any) -> redis.Redis:
        """A blocking client for the test's own commands to the server."""
        return redis.Redis(unix_socket_path=str(self.path), **kwargs)

    def since(self, *version: int) -> None:
        """Skip the test if the server is older."""
        with self.cli() as cli:
            has = str(cli.info("server")["redis_version"])  # type: ignore[index]
        if tuple(map(int, has.split(".")[: len(version)])) < version:
            pytest.skip(f"it needs Redis {'.'.join(map(str, version))}, and this server is {has}")

    def user(self, *rules: str) -> str:
        """The url of a user with all rights, changed by these ACL rules."""
        with self.cli() as cli:
            cli.execute_command("ACL", "SETUSER", "worker", "reset", "on", ">secret", "~*", "&*", "+@all", *rules)
        return f"unix://worker:secret@{self.path}"

    def allow(self, *rules: str) -> None:
        """Change the permissions of that user, while it is connected."""
        with self.cli() as cli:
            cli.execute_command("ACL", "SETUSER", "worker", *rules)

    def freeze(self) -> None:
        freeze(self.process)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        valkey.stop([self.process])

    def restart(self) -> None:
        """kill -9, and up again; empty unless its options persist."""
        self.kill()
        self.process = self._start()
        self.ready()


class Servers:
    """A folder of servers that end together."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="asynclock-test-")
        self._servers: list[Server] = []

    @property
    def folder(self) -> Path:
        return Path(self._folder.name)

    def start(self, *options: str) -> Server:
        return self._begin(*options).ready()

    def start_together(self, count: int, *options: str) -> list[Server]:
        """So many: all processes begin before the first is waited for."""
        return [server.ready() for server in [self._begin(*options) for _ in range(count)]]

    def _begin(self, *options: str) -> Server:
        server = Server(self.folder, f"s{len(self._servers)}", *options)
        self._servers.append(server)
        return server

    def stop(self) -> None:
        valkey.stop([server.process for server in self._servers])
        self._folder.cleanup()


class Several(Sequence[Server]):
    """So many servers; each is started when it is asked for. A test of one node and of five starts no more than it
    uses."""

    def __init__(self, pool: Servers, count: int) -> None:
        self._pool = pool
        self._count = count
        self._started: list[Server] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, which: Any) -> Any:
        wanted = range(self._count)[which]
        last = max(wanted, default=-1) if isinstance(which, slice) else wanted
        if last >= len(self._started):
            self._started += self._pool.start_together(last + 1 - len(self._started))
        return self._started[which] if not isinstance(which, slice) else [self._started[i] for i in wanted]

    def __iter__(self) -> Iterator[Server]:
        return iter(self[:])
