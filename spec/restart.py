"""Restarts: which of three servers may vote, in the view of a connecting client.

A restart may empty a server, or load a dump that has the mark of first use but not the latest holds. A holds all the
time, by two votes. B opens its connections to the servers that answer: for the first time, or again, in another event
loop. The shipped `judge` judges whether the deployment is new.

The model leaves out what no client can detect: all servers that answer have restarted empty, and the client has met
none of them before (docs/safety.md).

The flaw:
    two holders   B gets two votes, too
"""

from __future__ import annotations

from enum import StrEnum
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from asynclock.quorum import quarantine
from asynclock.quorum.quarantine import VOTES
from asynclock.stores.port import Facts
from spec.explorer import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES = 3
MAJORITY = NODES // 2 + 1
LENGTH = 1.0  # of a quarantine; it is time 0


class Rule(StrEnum):
    """The rules that can be taken out."""

    QUARANTINE = "a server that started less than the longest lease ago casts no vote"
    MARK = "a deployment is new only if no server that answers has the mark of first use ..."
    SEEN_OTHER = "... and this client has met no other server there"


BREAKS = dict.fromkeys(Rule, ("rolling", "two holders"))
"""For each rule: the scene that fails without it, and the flaw."""

SCENES = ("rolling",)


class Server(NamedTuple):
    """A server whose first use was in run 1, long ago."""

    run: int = 1
    mark: int = 1  # the run of its first use; 0: unused
    recent: bool = False  # started less than LENGTH ago
    held: bool = False  # by A


class World(NamedTuple):
    """The whole state."""

    servers: tuple[Server, ...] = (Server(held=True), Server(held=True), Server())
    met: tuple[bool, ...] = (False,) * NODES  # B has met the server before its restart
    over: bool = False  # A's lease has ended, and no server is in quarantine any more
    holds: bool = False  # B holds


class Restart:
    """The model."""

    def __init__(self, without: Rule | None = None) -> None:
        self.without = without

    def start(self) -> World:
        return World()

    def good(self, world: World) -> bool:
        return world.holds

    def wrong(self, world: World) -> str | None:
        return "two holders" if world.holds and not world.over else None

    def steps(self, world: World) -> Iterator[Step[World]]:
        if world.holds:
            return
        for n, server in enumerate(world.servers):
            if server.run == 1 and not world.over:
                empty, dump = Server(2, 0, recent=True), Server(2, 1, recent=True)
                yield Step(f"server {n}", "restarts empty", _with(world, n, empty), whim=True)
                yield Step(f"server {n}", "restarts with a dump", _with(world, n, dump), whim=True)
        for count in (MAJORITY, NODES):
            for answering in combinations(range(NODES), count):
                if world.over or any(world.met[n] or world.servers[n].mark for n in answering):
                    yield self._connected(world, answering)
        if not world.over:
            old = tuple(server._replace(recent=False, held=False) for server in world.servers)
            yield Step("time", "goes on by the longest lease", world._replace(servers=old, over=True))

    def _connected(self, world: World, answering: tuple[int, ...]) -> Step[World]:
        met = tuple(seen or (n in answering and world.servers[n].run == 1) for n, seen in enumerate(world.met))
        voters = self._voters(world, answering)
        did = f"connects to {_listed(answering)}, counts the votes of {_listed(voters) or 'none'}"
        holds = sum(not world.servers[n].held for n in voters) >= MAJORITY
        return Step("B", did + (": holds" if holds else ""), world._replace(met=met, holds=holds))

    def _voters(self, world: World, answering: tuple[int, ...]) -> tuple[int, ...]:
        if self.without is Rule.QUARANTINE:
            return answering
        facts = [self._facts(world, n) if n in answering else None for n in range(NODES)]
        ruling = quarantine.judge(facts, 0.0, LENGTH, complete=True)
        return tuple(n for n in answering if ruling.until[n] == VOTES)

    def _facts(self, world: World, n: int) -> Facts:
        server = world.servers[n]
        mark = "" if self.without is Rule.MARK or not server.mark else str(server.mark)
        other = self.without is not Rule.SEEN_OTHER and world.met[n] and server.run != 1
        before = -LENGTH if world.over else -LENGTH / 2
        return Facts(str(server.run), mark, -LENGTH / 2 if server.recent else -LENGTH, before if other else None)


def _listed(nodes: tuple[int, ...]) -> str:
    return ", ".join(map(str, nodes))


def _with(world: World, n: int, server: Server) -> World:
    return world._replace(servers=(*world.servers[:n], server, *world.servers[n + 1 :]))


def scene(name: str, without: Rule | None = None) -> Restart:
    del name
    return Restart(without)
