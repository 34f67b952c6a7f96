"""Lets the faults of a plan happen, and ends them all when the plan is over."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from redis.crc import key_slot

from simulation.stack.network import FROM, TO
from simulation.stack.plan import NEXT
from simulation.stack.servers import ClusterServer

if TYPE_CHECKING:
    from simulation.plan import Fault
    from simulation.stack.servers import Server
    from simulation.stack.world import World

_DIRECTIONS = {"to": TO, "from": FROM, "both": None}
_LAG = 0.05
"""Seconds by which a replica lags at a failover."""


class Faults:
    """See the module."""

    def __init__(self, world: World) -> None:
        self._world = world

    def begin(self, fault: Fault) -> None:
        """It ends by itself, at the latest with the plan."""
        world = self._world
        if fault.detail.endswith(NEXT):
            link = world.network.link(f"client{fault.client}", world.servers[fault.node].host)
            now = replace(fault, detail=fault.detail.removesuffix(NEXT).strip())
            link.arm(partial(self.begin, now))
            return
        world.counts["faults"] += 1
        world.watch.fault(fault)
        world.trace("fault", str(fault))
        seconds = max(0.0, min(fault.seconds, world.plan.seconds - world.schedule.now))
        if fault.what.startswith("crash"):
            self._crash(fault, seconds)
        elif fault.what in ("freeze", "errors", "noscript", "failover", "move"):
            self._at_server(fault, seconds)
        elif fault.what in ("rst", "half-open", "pieces", "slow", "partition", "isolate"):
            self._in_the_network(fault, seconds)
        else:
            self._at_client(fault, seconds)

    def _crash(self, fault: Fault, seconds: float) -> None:
        server, schedule = self._world.servers[fault.node], self._world.schedule
        if server.state != "up":
            return
        lost = fault.what.removeprefix("crash").strip()
        if lost == "rewound":
            server.snapshot()
            schedule.at(schedule.now + _LAG, server.crash_now, fault.detail)
        else:
            server.crash(silent=fault.detail == "silent")
        if lost:
            self._world.judge.forgot(server)
        schedule.at(schedule.now + _LAG + seconds, server.restart, lost)

    def _at_server(self, fault: Fault, seconds: float) -> None:
        world, schedule = self._world, self._world.schedule
        server = world.servers[fault.node]
        match fault.what:
            case "freeze":
                server.freeze(seconds)
            case "errors":
                server.errs = fault.detail
                schedule.at(schedule.now + seconds, setattr, server, "errs", "")
            case "noscript" if world.deployment.database is None:
                server.forget_scripts()
                if (client := world.clients[fault.client]) is not None:  # often what was in flight is given up
                    schedule.at(schedule.now + 2 * world.plan.delay * world.random.random(), client.cancel_one)
            case "failover" if world.deployment.sentinels:
                self._fail_over(fault, seconds)
            case "failover" if isinstance(server, ClusterServer):
                self._replace(server, seconds)
            case "move" if isinstance(server, ClusterServer):
                self._move(server, fault.detail, seconds)

    # -- Sentinel ----------------------------------------------------------------------------------------------------

    def _fail_over(self, fault: Fault, seconds: float) -> None:
        """The replica becomes the master. The sentinels learn of it one after the other; the old master may answer
        for a while, until it becomes a replica."""
        world, schedule = self._world, self._world.schedule
        old = world.deployment.master
        new = next(each for each in world.servers if each is not old)
        if new.state != "up" or new.role != "replica":
            return
        old.snapshot()
        schedule.at(schedule.now + _LAG, self._promote, old, new, fault.detail == "old is gone", seconds)

    def _promote(self, old: Server, new: Server, gone: bool, seconds: float) -> None:
        world, schedule = self._world, self._world.schedule
        if old.role != "master":
            return
        if gone:
            old.crash(silent=True)
        new.promote(old)
        epoch = world.count("epoch")
        for each in world.deployment.sentinels:
            schedule.at(schedule.now + world.random.uniform(0, 0.4), each.switch, new, epoch)
        old.role = "old master"
        old.switched_at = schedule.now + 0.4
        schedule.at(schedule.now + 0.5 + 2 * seconds, self._demote, old)

    def _demote(self, old: Server) -> None:
        old.demote()
        old.switched_at = math.inf
        old.restart("")

    # -- a cluster ---------------------------------------------------------------------------------------------------

    def _move(self, source: ClusterServer, number: str, seconds: float) -> None:
        """The slot of a lock is moved to another master, key by key."""
        world, schedule = self._world, self._world.schedule
        lock = world.plan.locks[int(number) % len(world.plan.locks)]
        slot = key_slot(f"lock:{lock.parts[0].name}".encode())
        owner = next((each for each in world.servers if isinstance(each, ClusterServer) and slot in each.slots), None)
        others = [each for each in world.servers if isinstance(each, ClusterServer) and each is not owner]
        if owner is None or owner.state != "up":
            return
        target = source if source is not owner else others[0]
        owner.give(slot, target)
        seconds = min(seconds, 2.0)
        for part in range(1, 6):
            schedule.at(schedule.now + seconds * part / 6, owner.give_key, slot)
        schedule.at(schedule.now + seconds, owner.give_all, slot)

    def _replace(self, server: ClusterServer, seconds: float) -> None:
        """Its replica takes its place, with its data of a moment before."""
        schedule = self._world.schedule
        if server.state == "up":
            server.snapshot()
            schedule.at(schedule.now + _LAG, server.crash_now, "silent")
            schedule.at(schedule.now + _LAG + 0.2 + min(seconds, 2.0), server.restart, "rewound")

    # -- links and processes -----------------------------------------------------------------------------------------

    def _in_the_network(self, fault: Fault, seconds: float) -> None:
        world, schedule = self._world, self._world.schedule
        link = world.network.link(f"client{fault.client}", world.servers[fault.node].host)
        database = world.deployment.database
        match fault.what:
            case "isolate":
                self._isolate(world.servers[fault.node].host, seconds)
            case "rst" if database is not None:
                database.cut(f"client{fault.client}", commits=fault.detail == "keeps")
            case "half-open" if database is not None:
                database.swallow(f"client{fault.client}")
            case "rst":
                for connection in list(link.connections):
                    connection.reset(keeps_requests=fault.detail == "keeps")
            case "half-open":
                for connection in list(link.connections):
                    connection.vanish(_DIRECTIONS[fault.detail])
            case "pieces":
                link.pieces_until = schedule.now + seconds
            case "slow":
                link.slow = 20.0
                schedule.at(schedule.now + seconds, setattr, link, "slow", 1.0)
            case _:
                for name, direction in (("to", TO), ("from", FROM)):
                    if fault.detail in (name, "both"):
                        link.block(direction, schedule.now + seconds)

    def _isolate(self, host: str, seconds: float) -> None:
        """No process reaches that host."""
        for slot in range(len(self._world.clients)):
            for direction in (TO, FROM):
                self._world.network.link(f"client{slot}", host).block(direction, self._world.schedule.now + seconds)

    def _at_client(self, fault: Fault, seconds: float) -> None:
        world, schedule, slot = self._world, self._world.schedule, fault.client
        client = world.clients[slot]
        if client is None:
            return
        match fault.what:
            case "look" | "break":
                lock = world.plan.locks[int(fault.detail) % len(world.plan.locks)]
                client.loop.post(client.operate, fault.what, lock)
            case "cancel":
                client.cancel_one()
            case "stop":
                client.loop.stop_for(seconds)
            case "kill" | "close":
                world.end(slot, fault.what == "kill", silent=fault.detail == "silent")
                schedule.at(schedule.now + seconds, world.start, slot)

    def heal(self) -> None:
        """What lasted until the end of the plan ends now."""
        world = self._world
        for each in [*world.servers, *world.deployment.sentinels]:
            each.heal()
        for link in world.network.links.values():
            link.heal()
        for slot in range(len(world.clients)):
            world.start(slot)
