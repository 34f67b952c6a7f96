"""Real servers for the tests: started, frozen, killed and restarted by them.

Their source is the first of these: $ASYNCLOCK_TEST_URLS (shared tests only: the tests must not kill those), the program
named by $ASYNCLOCK_TEST_SERVER, the embedded wheel's, and a container where an engine answers."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis

from asynclock.stores.embedded import server as valkey


class Server:
    """One server process on a unix socket of its own."""

    def __init__(self, folder: Path, name: str, *options: str) -> None:
        self.path = folder / f"{name}.sock"
        self.options = options
        self.process = self._start()

    def ready(self) -> Server:
        """Return once it answers."""
        valkey.wait_ready(self.path, self.process)
        return self

    def _start(self) -> Any:
        return valkey.start(self.path, *self.options, program=os.environ.get("ASYNCLOCK_TEST_SERVER"))

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def cli(self, **kwargs: Any) -> redis.Redis:
        """A blocking client for the test's own commands to the server."""
        return redis.Redis(unix_socket_path=str(self.path), **kwargs)

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
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)  # it may run on for a moment

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


def container_urls(count: int) -> tuple[list[str], list[Any]]:
    """The last resort, where neither wheel nor program is: containers. Raises where no engine answers."""
    from testcontainers.community.redis import RedisContainer  # its import needs docker's client

    containers = [RedisContainer("redis:7-alpine").start() for _ in range(count)]
    urls = [f"redis://{each.get_container_host_ip()}:{each.get_exposed_port(6379)}" for each in containers]
    return urls, containers
