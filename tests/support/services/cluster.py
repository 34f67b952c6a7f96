"""A Redis cluster: masters with replicas, real servers on free ports. Each begins with a file that names all others, so
that no time is lost with introductions. A new cluster refuses commands for two seconds."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from tests.support.containers import at_least, image, version, version_in
from tests.support.ports import free_ports
from tests.support.servers import Running, freeze, run
from tests.support.services import redis_server

SLOTS = 16384
_LIMIT = 60.0  # seconds until a cluster serves, on a busy machine
_GIVEN_UP = 6.0  # seconds after which a server has given up a failover that it was asked for


def wait_until(condition: Callable[[], Any], what: str, limit: float = _LIMIT) -> Any:
    """The first true result of `condition`, which may raise while a server starts or fails."""
    give_up = time.monotonic() + limit
    last: Exception | None = None
    while time.monotonic() < give_up:
        try:
            if found := condition():
                return found
        except (redis.RedisError, OSError) as error:
            last = error
        time.sleep(0.02)
    raise TimeoutError(f"not within {limit} s: {what}") from last


class Member:
    """One server of a cluster."""

    def __init__(self, binary: Path, folder: Path, number: int, *options: str) -> None:
        self.id = f"{os.urandom(18).hex()}{number:04x}"
        self.port, self.bus = free_ports(2)
        self.folder = folder / str(number)
        self.folder.mkdir()
        self._binary = binary
        self._arguments = [
            *("--port", str(self.port), "--cluster-port", str(self.bus), "--bind", "127.0.0.1"),
            *("--dir", str(self.folder), "--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"),
            *("--save", "", "--repl-diskless-sync-delay", "0", "--logfile", "log", *options),
        ]
        self.process: Running | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = run(self._binary, *self._arguments)

    def cli(self, *command: Any) -> Any:
        """The answer to one command, as it is. Raises ResponseError."""
        connection = redis.Connection(host="127.0.0.1", port=self.port, protocol=2, socket_timeout=5)
        try:
            connection.send_command(*command)
            return connection.read_response()
        finally:
            connection.disconnect()

    def info(self, command: str = "CLUSTER") -> dict[str, str]:
        words = ("CLUSTER", "INFO") if command == "CLUSTER" else ("INFO", command)
        return dict(line.split(":", 1) for line in self.cli(*words).decode().split() if ":" in line)

    def serves(self) -> bool:
        """Whether it takes part in its cluster. Raises RuntimeError with its log if it has ended."""
        if self.process is not None and self.process.poll() is not None:
            log = (self.folder / "log").read_text(errors="replace")
            raise RuntimeError(f"the server at {self.address} has ended: {log[-2000:]}")
        return self.info()["cluster_state"] == "ok"

    @property
    def role(self) -> str:
        """master or slave"""
        return self.info("replication")["role"]

    @property
    def master_port(self) -> int:
        """0: it is a master."""
        return int(self.info("replication").get("master_port", 0))

    def freeze(self) -> None:
        assert self.process is not None
        freeze(self.process)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@functools.cache
def _version(binary: Path) -> tuple[int, ...]:
    """Of the servers."""
    return version(tried) if (tried := image()) else version_in(subprocess.check_output([binary, "--version"]))


class Cluster:
    """Masters that share the slots, each with so many replicas."""

    def __init__(self, masters: int = 3, replicas: int = 1, *options: str) -> None:
        at_least(7, 0)  # --cluster-port
        self._binary = redis_server()
        self._has_shards = _version(self._binary) >= (7, 2)  # Valkey 9.1 aborts at SPUBLISH if it does not know its own
        self._folder = tempfile.TemporaryDirectory(prefix="asynclock-cluster-")
        self._options = ("--cluster-node-timeout", "400", "--cluster-replica-validity-factor", "0", *options)
        self.members: list[Member] = []
        for _ in range(masters * (1 + replicas)):
            self._member()
        self.masters = self.members[:masters]
        self.replicas = self.members[masters:]
        self._write_files(masters)
        for each in self.members:
            each.start()

    def _member(self, *options: str) -> Member:
        folder = Path(self._folder.name)
        member = Member(self._binary, folder, len(self.members), *(self._options + options))
        self.members.append(member)
        return member

    def _write_files(self, masters: int) -> None:
        """Each server reads who is in the cluster, and which slots each master has."""
        for me in self.members:
            lines = [self._line(number, each, masters, mine=each is me) for number, each in enumerate(self.members)]
            text = "\n".join([*lines, f"vars currentEpoch {masters} lastVoteEpoch 0", ""])
            (me.folder / "nodes.conf").write_text(text)

    def _line(self, number: int, each: Member, masters: int, *, mine: bool) -> str:
        shard = f",,shard-id={self.members[number % masters].id}" if self._has_shards else ""
        head = f"{each.id} 127.0.0.1:{each.port}@{each.bus}{shard} {'myself,' if mine else ''}"
        if number >= masters:
            return f"{head}slave {self.members[number % masters].id} 0 0 {number % masters + 1} connected"
        first, last = SLOTS * number // masters, SLOTS * (number + 1) // masters - 1
        return f"{head}master - 0 0 {number + 1} connected {first}-{last}"

    def ready(self) -> Cluster:
        """Return once each member serves, and each replica has the data of its master. What does not become ready is
        stopped."""
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait_ready(self) -> None:
        for each in self.members:
            wait_until(lambda each=each: each.serves(), "the cluster serves")
        wait_until(self._has_replicas, "a master, or a replica with its data")

    def _has_replicas(self) -> bool:
        """Whether there are so many masters, and each other member has the data of one. A failover that has begun may
        still change who they are, so all are asked in one look."""
        found = {each: each.info("replication") for each in self.members}
        masters = [each for each in self.members if found[each]["role"] == "master"]
        if len(masters) != len(self.masters):
            return False
        self.masters = masters
        self.replicas = [each for each in self.members if each not in masters]
        return all(found[each].get("master_link_status") == "up" for each in self.replicas)

    @property
    def url(self) -> str:
        """Of two members, in case that one is down."""
        return f"redis+cluster://{','.join(each.address for each in self.members[:2])}"

    @property
    def all_urls(self) -> str:
        """Of all members."""
        return f"redis+cluster://{','.join(each.address for each in self.members)}"

    def replica_of(self, master: Member) -> Member:
        """Its replica, which may run alone."""
        return next(each for each in self.up() if each is not master and each.master_port == master.port)

    def heal(self) -> None:
        """Start and thaw all members; return once each master has its replica again."""
        for each in self.members:
            each.thaw()
            if each.process is None or each.process.poll() is not None:
                each.start()
        self._wait_ready()

    def up(self) -> list[Member]:
        return [each for each in self.members if each.process is not None and each.process.poll() is None]

    async def refused(self, code: str, more_than: int) -> None:
        """Return once the members have answered more than so many commands with that error."""
        while self.refusals(code) <= more_than:
            await asyncio.sleep(0.01)

    def refusals(self, code: str) -> int:
        """How many commands the members have answered with that error."""
        found = [each.info("errorstats").get(f"errorstat_{code}", "count=0") for each in self.up()]
        return sum(int(each.partition("=")[2]) for each in found)

    def owner(self, slot: int) -> Member:
        """The master of a slot, as the members that run say."""
        for each in self.up():
            for first, last, (_, port, *_), *_ in each.cli("CLUSTER", "SLOTS"):
                if first <= slot <= last:
                    return next(member for member in self.members if member.port == port)
        raise LookupError(slot)

    def drop(self, slot: int) -> Member:
        """Take a slot from its master. Returns that. A member that reads late what the master had told of its slots
        would give it the slot back: so the master goes first, and the others when they have read all that it told."""
        owner = self.owner(slot)
        owner.cli("CLUSTER", "DELSLOTS", slot)
        for each in [owner, *self.up()]:
            each.cli("PING")  # by a new connection: meanwhile the old master sends what is left, and the others read it
        for each in self.up():
            if each is not owner:
                each.cli("CLUSTER", "DELSLOTS", slot)
        return owner

    def begin_move(self, slot: int, to: Member) -> Member:
        """The slot begins to move: its owner sends clients on for keys that it does not have. Returns the owner."""
        source = self.owner(slot)
        to.cli("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.cli("CLUSTER", "SETSLOT", slot, "MIGRATING", to.id)
        return source

    def move_keys(self, slot: int, source: Member, to: Member) -> int:
        """Move the keys of a slot. Returns how many."""
        moved = 0
        while keys := source.cli("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.cli("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *keys)
            moved += len(keys)
        return moved

    def end_move(self, slot: int, to: Member) -> None:
        """The slot has moved."""
        masters = [each for each in self.up() if each.role == "master"]
        for each in sorted(masters, key=lambda each: each is not to):  # the new owner first
            try:
                each.cli("CLUSTER", "SETSLOT", slot, "NODE", to.id)
            except redis.ResponseError:  # it lost its last slot, and became a replica
                if each.role == "master":
                    raise

    def move(self, slot: int, to: Member) -> None:
        """Move a slot with its keys, as redis-cli --cluster reshard does."""
        source = self.begin_move(slot, to)
        self.move_keys(slot, source, to)
        self.end_move(slot, to)

    def promote(self, replica: Member, *how: str) -> None:
        """CLUSTER FAILOVER. A server that is too busy for it gives it up after 5 s, and says so in its log only: then
        it is asked again."""
        asked_at = -math.inf

        def promoted() -> bool:
            nonlocal asked_at
            if replica.role == "master":
                return True
            if time.monotonic() - asked_at > _GIVEN_UP:
                asked_at = time.monotonic()
                replica.cli("CLUSTER", "FAILOVER", *how)
            return False

        wait_until(promoted, "a replica was promoted")

    def add_master(self) -> Member:
        """A new master without slots, which all members know."""
        member = self._member()
        member.start()
        wait_until(lambda: member.cli("PING"), "a new member answers")
        member.id = member.cli("CLUSTER", "MYID").decode()
        member.cli("CLUSTER", "MEET", "127.0.0.1", self.members[0].port, self.members[0].bus)
        for each in self.up():
            wait_until(lambda each=each: member.id in each.cli("CLUSTER", "NODES").decode(), "all know it")
        wait_until(lambda: member.info()["cluster_state"] == "ok", "it serves")
        return member

    def stop(self) -> None:
        for each in self.members:
            each.kill()
        self._folder.cleanup()
