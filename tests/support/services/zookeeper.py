"""Real ZooKeeper servers, from Debian's package, each started with java directly: alone, or as an ensemble."""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.ports import free_ports
from tests.support.servers import freeze
from tests.support.services import needs, program
from tests.support.tied import start_tied

_JAR = Path("/usr/share/java/zookeeper.jar")
_PATIENCE = 30.0
_JAVA = (
    *("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", "-Xmx128m", "-XX:-UsePerfData"),
    *("-Dzookeeper.admin.enableServer=false", "-Djava.awt.headless=true"),
)
_FAST = ("-Dzookeeper.forceSync=no",)
"""Tests look at locks, not at what a disk keeps: no fsync."""

_TTL = ("-Dzookeeper.extendedTypesEnabled=true", "-Dznode.container.checkIntervalMs=200")
"""Nodes with a TTL, which are deleted soon after it."""

_READ_ONLY = ("-Dreadonlymode.enabled=true",)
"""A server without a quorum serves clients that only read."""

_MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"


class ZooKeeper:
    """One server process. `peers`: the lines of its ensemble; `number`: its own in that."""

    def __init__(
        self,
        folder: Path,
        port: int,
        *,
        number: int = 0,
        peers: str = "",
        longest: float = 60.0,
        ttl: bool = True,
        durable: bool = False,
        read_only: bool = False,
        host: str = "127.0.0.1",
    ) -> None:
        self.host = host
        self.port = port
        self._options = (
            *_JAVA,
            *(_TTL if ttl else ()),
            *(() if durable else _FAST),
            *(_READ_ONLY if read_only else ()),
        )
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "zoo.cfg").write_text(
            f"tickTime=100\ninitLimit=100\nsyncLimit=20\ndataDir={folder}/data\nclientPort={port}\n"
            f"clientPortAddress={host}\n4lw.commands.whitelist=*\nmaxClientCnxns=0\n"
            f"minSessionTimeout=200\nmaxSessionTimeout={int(longest * 1000)}\n{peers}"
        )
        (folder / "data").mkdir(exist_ok=True)
        if number:
            (folder / "data" / "myid").write_text(str(number))

    def give_at_most(self, longest: float) -> None:
        """Its maxSessionTimeout from its next start on."""
        file = self.folder / "zoo.cfg"
        file.write_text(f"{file.read_text()}maxSessionTimeout={int(longest * 1000)}\n")

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def url(self, path: str = "/locks", **options: object) -> str:
        """The url of this server."""
        return url_of([self], path, **options)

    def start(self) -> None:
        """Start it, without waiting for it."""
        (java,) = needs("java", program("java"))
        needs("ZooKeeper", _JAR if _JAR.exists() else None)
        with (self.folder / "log").open("ab") as log:
            self._process = start_tied(
                [java, *self._options, "-cp", str(_JAR), _MAIN, str(self.folder / "zoo.cfg")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> str:
        """Wait until it serves. Its mode: standalone, leader or follower."""
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            if mode := self.mode():
                return mode
            time.sleep(0.02)
        raise AssertionError(f"ZooKeeper did not start: {(self.folder / 'log').read_text()[-2000:]}")

    def mode(self) -> str:
        """Its mode; "" while it does not serve."""
        for line in self.ask("srvr").splitlines():
            if line.startswith("Mode:"):
                return line.partition(":")[2].strip()
        return ""

    def ask(self, word: str) -> str:
        """The answer to a four letter word; "" if it does not answer."""
        try:
            with socket.create_connection((self.host, self.port), timeout=5.0) as sock:
                sock.settimeout(5.0)
                sock.sendall(word.encode())
                parts = []
                while part := sock.recv(65536):
                    parts.append(part)
        except OSError:
            return ""
        return b"".join(parts).decode(errors="replace")

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def freeze(self) -> None:
        assert self._process is not None
        freeze(self._process)

    def thaw(self) -> None:
        self.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """As a power cut does to it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


class ZooKeepers:
    """The servers of one test, or of one worker; all end with it. `durable`: they sync each write to the disk, as those
    of users do."""

    def __init__(self, *, durable: bool = False) -> None:
        self._durable = durable
        self._folder = tempfile.TemporaryDirectory(prefix="asynclock-zk-")
        self._all: list[ZooKeeper] = []

    def start(self, *, longest: float = 60.0, ttl: bool = True) -> ZooKeeper:
        """One server that is alone. `longest`: its maxSessionTimeout; `ttl`: whether it has nodes with a TTL."""
        server = self._made(free_ports(1)[0], longest=longest, ttl=ttl)
        server.start()
        server.wait()
        return server

    def ensemble(self, number: int = 3, *, read_only: bool = False, one_port: bool = False) -> list[ZooKeeper]:
        """So many servers that are one ensemble. `read_only`: without a quorum they go on in read-only mode.
        `one_port`: each has the same port, at an address of its own."""
        ports = free_ports(3 * number)
        peers = "".join(f"server.{i + 1}=127.0.0.1:{ports[3 * i + 1]}:{ports[3 * i + 2]}\n" for i in range(number))
        servers = [
            self._made(
                ports[0 if one_port else 3 * i],
                number=i + 1,
                peers=peers,
                read_only=read_only,
                host=f"127.0.0.{i + 1}" if one_port else "127.0.0.1",
            )
            for i in range(number)
        ]
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        return servers

    def _made(
        self,
        port: int,
        *,
        number: int = 0,
        peers: str = "",
        longest: float = 60.0,
        ttl: bool = True,
        read_only: bool = False,
        host: str = "127.0.0.1",
    ) -> ZooKeeper:
        folder = Path(self._folder.name) / str(len(self._all))
        options: Any = {"number": number, "peers": peers, "longest": longest, "ttl": ttl, "read_only": read_only}
        made = ZooKeeper(folder, port, durable=self._durable, host=host, **options)
        self._all.append(made)
        return made

    def stop(self) -> None:
        """End them all."""
        for server in self._all:
            server.kill()
        self._folder.cleanup()


def url_of(servers: list[ZooKeeper], path: str = "/locks", **options: object) -> str:
    """The url of an ensemble."""
    query = "&".join(f"{key}={value}" for key, value in options.items())
    return f"zookeeper://{','.join(each.address for each in servers)}{path}{'?' if query else ''}{query}"
