"""The servers, each on a host of the network: frozen, killed and started again."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tests.support.chaos.network import Impossible, Network, inside
from tests.support.containers import image
from tests.support.servers import Server
from tests.support.services.postgresql import PostgreSQL, until
from tests.support.services.zookeeper import ZooKeeper


class Node(Protocol):
    """A server on a host."""

    @property
    def url(self) -> str: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...
    def kill(self) -> None: ...
    def restart(self) -> None:
        """After kill(). Returns once it serves."""

    def stored(self) -> list[str]:
        """What it keeps, as another program sees it; [] where only its own clients know how to read it."""


def ensure_processes() -> None:
    """Raise Impossible where the Redis servers of the tests are containers."""
    if tried := image():
        raise Impossible(f"a server of {tried} is a container, which cannot enter a network namespace")


class RedisNode:
    """In memory only, unless `durable`: then each write is on its disk before the answer."""

    def __init__(self, network: Network, host: str, *, durable: bool) -> None:
        """Raises Impossible where the servers of the tests are containers."""
        ensure_processes()
        self._space, self._address = network.namespace(host), network.address(host)
        folder = network.folder / host
        folder.mkdir()
        options = ["--port", "6379", "--bind", self._address, "--protected-mode", "no"]
        options += ["--appendonly", "yes", "--appendfsync", "always"] if durable else []
        with inside(self._space):
            self._server = Server(folder, "redis", *options).ready()
        self.freeze, self.thaw, self.kill = self._server.freeze, self._server.thaw, self._server.kill

    @property
    def url(self) -> str:
        return f"redis://{self._address}:6379"

    def restart(self) -> None:
        with inside(self._space):
            self._server.restart()

    def stored(self) -> list[str]:
        with self._server.cli() as cli:  # over its unix socket: a namespace hides none
            return sorted(key.decode() for key in cli.keys("*"))


class PostgreSQLNode:
    """Durable: it writes its log before it answers."""

    def __init__(self, network: Network, host: str) -> None:
        self._space, self._address = network.namespace(host), network.address(host)
        folder = network.folder / host
        folder.mkdir(mode=0o755)
        self._server = PostgreSQL(folder, 5432, listen_addresses=self._address)
        self._server.make()
        with (folder / "data" / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 10.77.0.0/24 trust\n")
        with inside(self._space):
            self._server.start()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{self._address}:5432/postgres"

    def freeze(self) -> None:
        for pid in self._all():
            _send(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self._all():
            _send(pid, signal.SIGCONT)

    def kill(self) -> None:
        """All its processes, as when its machine dies. A child that is left would keep the next one from starting."""
        process = self._server.process
        assert process is not None
        group = self._all()
        for pid in group:
            _send(pid, signal.SIGKILL)
        process.wait()
        self._server.process = None
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in group), "processes of PostgreSQL do not end")
        (self._server.folder / "data" / "postmaster.pid").unlink()  # start() reads it

    def restart(self) -> None:
        with inside(self._space):
            self._server.start()

    def stored(self) -> list[str]:
        return []

    def _all(self) -> list[int]:
        """The children as well. The server is stopped first, so that it starts no more."""
        assert self._server.process is not None
        _send(self._server.process.pid, signal.SIGSTOP)
        time.sleep(0.001)
        return self._server.group


class ZooKeeperNode:
    """Durable: its log survives its process."""

    def __init__(self, network: Network, host: str, lease: float) -> None:
        self._space, self._address = network.namespace(host), network.address(host)
        self._lease = lease
        self._server = ZooKeeper(network.folder / host, 2181, host=self._address)
        self.restart()
        self.freeze, self.thaw, self.kill = self._server.freeze, self._server.thaw, self._server.kill

    @property
    def url(self) -> str:
        return self._server.url(session_timeout=self._lease)

    def restart(self) -> None:
        with inside(self._space):
            self._server.start()
            self._server.wait()

    def stored(self) -> list[str]:
        return []


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def make(store: str, network: Network, host: str, *, lease: float, durable: bool) -> Node:
    """A node that serves. The session of ZooKeeper is the lease."""
    if store == "postgresql":
        return PostgreSQLNode(network, host)
    return ZooKeeperNode(network, host, lease) if store == "zookeeper" else RedisNode(network, host, durable=durable)
