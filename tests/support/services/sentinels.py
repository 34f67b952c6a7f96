"""A deployment of Redis Sentinel: a master, replicas and three sentinels, of Debian's redis-server, on free ports."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from asynclock.stores.embedded.server import stop
from tests.support.containers import at_least
from tests.support.ports import free_port
from tests.support.servers import Running, freeze, run
from tests.support.services import redis_server

NAME = "mymaster"
_LIMIT = 20.0  # seconds
_START, _ATTEMPTS = 7.0, 3  # seconds for a part of the start, and attempts to start
_FAST = {
    "PING-PERIOD": 300, "INFO-PERIOD": 200, "PUBLISH-PERIOD": 200, "ASK-PERIOD": 100, "ELECTION-TIMEOUT": 1000,
    "TILT-TRIGGER": 10_000, "TILT-PERIOD": 100,
}  # fmt: skip
"""The periods of the sentinels, in ms. With the usual ones (1 to 10 s) a short `down_after` causes one failover after
the other: a sentinel takes a new master for one that is down before it has asked it. In TILT, which it enters on a
busy machine, it does nothing for 30 s."""

_USUAL = {"PING-PERIOD": 1000, "INFO-PERIOD": 10_000, "PUBLISH-PERIOD": 2000, "ASK-PERIOD": 1000}


class Part:
    """One process of a deployment."""

    def __init__(self, host: str, port: int, password: str, arguments: list[str], ca: Path | None = None) -> None:
        self._program = redis_server()
        self._ca = ca
        self.host = host
        self.port = port
        self.password = password
        self._arguments = arguments
        self.process = self._start()

    def _start(self) -> Running:
        return run(self._program, *self._arguments, tied=True)

    def cli(self) -> redis.Redis:
        tls: dict[str, Any] = {} if self._ca is None else {"ssl": True, "ssl_ca_certs": str(self._ca)}
        return redis.Redis(host=self.host, port=self.port, password=self.password or None, socket_timeout=2.0, **tls)

    def kill(self) -> None:
        stop([self.process])

    def freeze(self) -> None:
        freeze(self.process)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.process = self._start()

    @property
    def role(self) -> str:
        """ "master" or "slave"; "" while it does not answer."""
        try:
            with self.cli() as cli:
                return str(cli.info("replication")["role"])  # type: ignore[index]
        except redis.RedisError:
            return ""


def wait(check: Callable[[], object], what: str, limit: float = _LIMIT) -> None:
    """Block until `check` is true. An error of a server that is not up yet counts as false."""
    deadline = time.monotonic() + limit
    while True:
        try:
            if check():
                return
        except (redis.RedisError, OSError):
            pass
        assert time.monotonic() < deadline, f"{what}: not within {limit:g} s"
        time.sleep(0.02)


def start_server(port: int) -> Part:
    """A single server."""
    return Part("127.0.0.1", port, "", ["--port", str(port), "--save", "", "--bind", "127.0.0.1"])


class Deployment:
    """The first of `servers` is the master at the start."""

    def __init__(
        self,
        *,
        replicas: int = 2,
        sentinels: int = 3,
        down_after: int = 2_000,
        password: str = "",
        sentinel_password: str = "",
        host: str = "127.0.0.1",
        tls: Path | None = None,
    ) -> None:
        """`tls`: a folder with ca.pem and server.pem (certificate and key); then nothing listens without TLS."""
        at_least(7, 0)  # SENTINEL DEBUG
        self._host = host
        self._count = sentinels
        self._tls = tls
        self._down_after = down_after
        self._password = password
        self._sentinel_password = sentinel_password
        self.servers: list[Part] = []
        self.sentinels: list[Part] = []
        for attempt in range(_ATTEMPTS):  # another program may take a port that was free
            try:
                self._begin(replicas)
                return
            except BaseException as error:
                self.stop()
                if attempt + 1 == _ATTEMPTS or not isinstance(error, AssertionError):
                    raise

    def _begin(self, replicas: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="asynclock-test-")
        self.servers, self.sentinels = [], []
        first = self._server()
        for _ in range(replicas):
            self._server("--replicaof", self._host, str(first.port))
        for each in self.servers:
            wait(lambda each=each: each.cli().ping(), "a server answers", _START)
        for _ in range(self._count):
            self._sentinel(free_port(), first.port)
        self.ready()
        wait(lambda: self._linked(first) == replicas, "the replicas follow", _START)

    def ready(self) -> None:
        """Wait until all sentinels know each other and the servers."""
        fast = [word for item in _FAST.items() for word in item]
        for each in self.sentinels:
            wait(lambda each=each: each.cli().execute_command("SENTINEL", "DEBUG", *fast), "a sentinel answers", _START)
        replicas = len(self.servers) - 1
        wait(lambda: all(self._is_complete(each, replicas) for each in self.sentinels), "the sentinels agree", _START)
        for each in self.sentinels:  # one that has not heard of a promotion for four of these undoes it
            with each.cli() as cli:
                cli.execute_command("SENTINEL", "DEBUG", "PUBLISH-PERIOD", 1000)

    def slow_down(self) -> None:
        """Have the sentinels ask as seldom as they usually do. Of a deployment without failovers: it takes less CPU."""
        usual = [word for item in _USUAL.items() for word in item]
        for each in self.sentinels:
            with each.cli() as cli:
                cli.execute_command("SENTINEL", "DEBUG", *usual)

    def _server(self, *options: str) -> Part:
        port = free_port()
        secret = ["--requirepass", self._password, "--masterauth", self._password] if self._password else []
        part = Part(
            self._host,
            port,
            self._password,
            [
                *(*self._ports(port), "--bind", self._host, "--dir", self._folder.name),
                *("--save", "", "--appendonly", "no", "--daemonize", "no", "--dbfilename", f"{port}.rdb"),
                *("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"),
                *("--enable-debug-command", "yes", *secret, *options),
            ],
            self._ca,
        )
        self.servers.append(part)
        return part

    def _ports(self, port: int) -> list[str]:
        """The options for that port."""
        if self._tls is None:
            return ["--port", str(port)]
        ca, server = str(self._tls / "ca.pem"), str(self._tls / "server.pem")
        files = ["--tls-ca-cert-file", ca, "--tls-cert-file", server, "--tls-key-file", server]
        return ["--port", "0", "--tls-port", str(port), "--tls-replication", "yes", "--tls-auth-clients", "no", *files]

    @property
    def _ca(self) -> Path | None:
        return None if self._tls is None else self._tls / "ca.pem"

    def _sentinel(self, port: int, master: int) -> None:
        path = Path(self._folder.name) / f"sentinel-{port}.conf"
        ports = " ".join(self._ports(port)).replace("--", "\n").strip()
        path.write_text(
            f"{ports}\nbind {self._host}\ndir {self._folder.name}\n"
            f"sentinel monitor {NAME} {self._host} {master} {self._count // 2 + 1}\n"
            f"sentinel down-after-milliseconds {NAME} {self._down_after}\n"
            f"sentinel failover-timeout {NAME} 1500\n"
            + (f"sentinel auth-pass {NAME} {self._password}\n" if self._password else "")
            + (f"requirepass {self._sentinel_password}\n" if self._sentinel_password else "")
            + (f"sentinel sentinel-pass {self._sentinel_password}\n" if self._sentinel_password else "")
        )
        part = Part(self._host, port, self._sentinel_password, [str(path), "--sentinel"], self._ca)
        self.sentinels.append(part)

    def _is_complete(self, sentinel: Part, replicas: int) -> bool:
        said = self.state(sentinel)
        return (said["num-slaves"], said["num-other-sentinels"]) == (replicas, self._count - 1)

    def _linked(self, master: Part) -> int:
        """The number of replicas that have all that the master wrote. A replica that is "online" may still lack it."""
        with master.cli() as cli:
            cli.publish("any", "")  # replicas get it, and it leaves no key
            return int(cli.wait(len(self.servers), 100))

    # -- what it says ------------------------------------------------------------------------------------------------

    def state(self, sentinel: Part) -> dict[str, object]:
        with sentinel.cli() as cli:
            return dict(cli.sentinel_master(NAME))

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        hosts = ",".join(f"{host}:{each.port}" for each in self.sentinels)
        login = f":{self._password}@" if self._password else ""
        secret = f"?sentinel_password={self._sentinel_password}" if self._sentinel_password else ""
        scheme = "redis+sentinel" if self._tls is None else "rediss+sentinel"
        return f"{scheme}://{login}{hosts}/{NAME}{secret}"

    @property
    def master(self) -> Part:
        """The server that the first sentinel in reach names as the master."""
        for each in self.sentinels:
            if each.process.poll() is None:
                port = int(str(self.state(each)["port"]))
                return next(server for server in self.servers if server.port == port)
        raise AssertionError("no sentinel is left")

    @property
    def replicas(self) -> list[Part]:
        master = self.master
        return [each for each in self.servers if each is not master]

    # -- what is done to it ------------------------------------------------------------------------------------------

    def failover(self) -> Part:
        """SENTINEL FAILOVER; returns the new master once all sentinels name it."""
        before = self.master
        with self.sentinels[0].cli() as cli:
            wait(lambda: cli.execute_command("SENTINEL", "FAILOVER", NAME), "a failover begins")
        return self.switched_from(before)

    def switched_from(self, before: Part) -> Part:
        """The new master, once all sentinels that run name another one than `before`."""
        alive = [each for each in self.sentinels if each.process.poll() is None]
        wait(lambda: all(int(str(self.state(each)["port"])) != before.port for each in alive), "the sentinels switch")
        return self.master

    def settle(self) -> None:
        """Wait until the new master has all other live servers as replicas, and one more failover can begin."""
        alive = sum(each.process.poll() is None for each in self.servers)
        wait(lambda: self._linked(self.master) == alive - 1, "the replicas follow")

    def unlink_replicas(self) -> None:
        """Freeze the replicas without a connection to the master: what it is told from now on is lost with it."""
        master, replicas = self.master, self.replicas
        for each in replicas:
            each.freeze()
        with master.cli() as cli:
            cli.client_kill_filter(_type="replica")

    def stop(self) -> None:
        stop([each.process for each in (*self.sentinels, *self.servers)])
        self._folder.cleanup()


@pytest.fixture(scope="session")
def sentinel_deployment() -> Iterator[Deployment]:
    """A deployment that lives as long as the tests, for tests that do not harm it. Its sentinels take no server for
    dead: a busy machine is no reason for a failover."""
    deployment = Deployment(down_after=3_600_000)
    deployment.slow_down()
    yield deployment
    deployment.stop()
