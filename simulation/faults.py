"""Lets the faults of a plan happen, and ends them all when the plan is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.network import Link
    from simulation.plan import Fault
    from simulation.world import World


class Faults:
    """See the module."""

    def __init__(self, world: World) -> None:
        self._world = world

    def begin(self, fault: Fault) -> None:
        """It ends by itself, at the latest with the plan."""
        world = self._world
        world.count("faults")
        world.trace("fault", str(fault))
        seconds = min(fault.seconds, world.plan.seconds - world.schedule.now)
        if fault.what.startswith("crash"):
            self._crash(fault, seconds)
        elif fault.what in ("evict", "step", "freeze", "errors", "noscript"):
            self._at_server(fault, seconds)
        elif fault.what in ("cut", "partition", "slow", "isolate", "alone"):
            self._in_the_network(fault, seconds)
        else:
            self._at_client(fault, seconds)

    def _crash(self, fault: Fault, seconds: float) -> None:
        server, schedule = self._world.servers[fault.node], self._world.schedule
        if not server.up:
            return
        lost = fault.what.removeprefix("crash").strip()
        server.crash(fault.detail == "silent")
        schedule.at(schedule.now + seconds, server.restart, lost)
        if lost:
            self._world.judge.forgot(server)
            schedule.at(schedule.now + seconds, self._world.judge.forgot, server)

    def _at_server(self, fault: Fault, seconds: float) -> None:
        server, schedule = self._world.servers[fault.node], self._world.schedule
        match fault.what:
            case "evict":
                for part in fault.lock.parts if fault.lock is not None else ():
                    server.evict(part.name)
            case "step":
                server.step(fault.seconds)
            case "freeze":
                server.freeze(seconds)
            case "errors":
                server.fails = True
                schedule.at(schedule.now + seconds, setattr, server, "fails", False)
            case "noscript":
                server.unknown_scripts += 5

    def _in_the_network(self, fault: Fault, seconds: float) -> None:
        world, schedule = self._world, self._world.schedule
        link = world.links[fault.client, fault.node]
        match fault.what:
            case "cut":
                for connection in list(link.connections):
                    connection.cut()
            case "slow":
                link.slow = 20.0
                schedule.at(schedule.now + seconds, setattr, link, "slow", 1.0)
            case "isolate":
                for (_, node), each in world.links.items():
                    if node == fault.node:
                        each.block(0, schedule.now + seconds)
                        each.block(1, schedule.now + seconds)
            case "alone":
                nodes = len(world.servers)
                for node in range(fault.node, fault.node + nodes // 2 + 1):
                    self._block(world.links[fault.client, node % nodes], fault.detail, seconds)
            case _:
                self._block(link, fault.detail, seconds)

    def _block(self, link: Link, detail: str, seconds: float) -> None:
        for direction, name in enumerate(("to", "from")):
            if detail in (name, "both"):
                link.block(direction, self._world.schedule.now + seconds)

    def _at_client(self, fault: Fault, seconds: float) -> None:
        world, schedule, slot = self._world, self._world.schedule, fault.client
        client = world.clients[slot]
        if client is None:
            return
        match fault.what:
            case "stop":
                client.loop.stop(seconds)
            case "wall":
                client.clock.step(fault.seconds)
            case "break" if fault.lock is not None:
                client.loop.post(client.break_lock, fault.lock)
            case "kill" | "close":
                world.end(slot, at_once=fault.what == "kill")
                schedule.at(schedule.now + seconds, world.start, slot)

    def heal(self) -> None:
        """What lasted until the end of the plan ends now."""
        for slot in range(len(self._world.clients)):
            self._world.start(slot)
