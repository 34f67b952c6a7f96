"""The servers of a plan: one, several, a master with its replica and sentinels, a cluster, or a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulation.stack.database import Database, DatabaseStore
from simulation.stack.servers import ClusterServer, SentinelServer, Server

if TYPE_CHECKING:
    from simulation.stack.world import World

_SLOTS = 16384


class Deployment:
    """`servers` have data; `nodes` is the number of nodes that a client has."""

    def __init__(self, world: World) -> None:
        plan = world.plan
        self.world = world
        self.servers: list[Server] = []
        self.database: Database | None = None
        self.sentinels: list[SentinelServer] = []
        cluster, quorum = plan.deployment == "cluster", plan.deployment in ("three", "five")
        self.nodes = len(plan.nodes) if quorum else 1
        if plan.deployment == "database":
            node = plan.nodes[0]
            self.database = Database(world, world.random_of("database"), node.rate, node.offset)
        for index, node in enumerate(plan.nodes if self.database is None else ()):
            host, kind = f"10.0.0.{index + 1}", ClusterServer if cluster else Server
            place = index if quorum else 0
            server = kind(world, host, 6379, place, world.random_of(f"server {index}"), node.rate, node.offset)
            server.native = plan.native
            self.servers.append(server)
        if cluster:
            self._share_slots()
        elif plan.deployment == "sentinel":
            self._watch()
        if not plan.new:
            for server in self.servers:
                server.age(10_000.0, mark=not cluster)
        self._urls_of_servers = self._urls()

    def nodes_for(self, name: str) -> tuple[Any, ...]:
        """The nodes of a client."""
        if self.database is not None:
            return (DatabaseStore(self.database, self.world.random_of(f"driver of {name}")),)
        return self._urls_of_servers

    @property
    def stored(self) -> list[Any]:
        """What keeps states."""
        return [self.database] if self.database is not None else list(self.servers)

    @property
    def master(self) -> Server:
        """Of the Sentinel deployment, as the last failover left it."""
        return next(each for each in self.servers if each.role == "master")

    def _urls(self) -> tuple[str, ...]:
        if self.sentinels:
            where = ",".join(each.label for each in self.sentinels)
            return (f"redis+sentinel://{where}/mymaster",)
        if self.world.plan.deployment == "cluster":
            return ("redis+cluster://" + ",".join(each.label for each in self.servers),)
        return tuple(f"redis://{each.label}" for each in self.servers)

    def _share_slots(self) -> None:
        count = len(self.servers)
        for index, server in enumerate(self.servers):
            assert isinstance(server, ClusterServer)  # noqa: S101
            begin, end = index * _SLOTS // count, (index + 1) * _SLOTS // count
            server.slots = set(range(begin, end))
            for each in self.servers:
                assert isinstance(each, ClusterServer)  # noqa: S101
                each.view.update(dict.fromkeys(range(begin, end), server))

    def _watch(self) -> None:
        self.servers[1].role = "replica"
        for index in range(3):
            sentinel = SentinelServer(
                self.world, f"10.0.1.{index + 1}", 26379, -1, self.world.random_of(f"sentinel {index}"), 1.0, 0.0,
                master=self.servers[0],
            )  # fmt: skip
            self.sentinels.append(sentinel)
