"""How soon a waiter is served: a name does not stay free while somebody waits for it."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

from asynclock.rules.model import VISITED, State
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import wants
from simulation.calm import SINCE, has_no_majority

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from asynclock.rules.model import Entry, Part
    from simulation.plan import LockPlan
    from simulation.waiting import Wait
    from simulation.world import World

_EMPTY = State()

_POLLED = 0.25
"""Seconds between two questions of a waiter that gets no notices, at most."""


class Promptness:
    """In two ways. A mutex is entered soon after the program that had it has released it. And at each look of the
    Judge: a name that the servers would give to a waiter, however it became free (a release, an undo, a break, the end
    of the lease of a dead holder), does not stay so. Then someone enters it, of whatever kind. A reader that would
    enter beside other readers enters itself, whoever else does, unless a writer waits: that one holds readers back.

    A waiter for several names counts while all of them are free. A semaphore that its clients use with several numbers
    of permits does not count: a waiter with a small number may stand before one that could enter. It does not look near
    a fault (`calm.py`). Where the servers send no notices, a waiter asks every 0.25 s, and of several names each may be
    kept free for another waiter that asks so seldom: they do not count."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._calm = world.calm
        self._entered_at: dict[str, float] = {}
        self._uneven = _uneven([job.lock for job in world.plan.jobs])
        self._deaf = {slot for slot, _ in world.plan.deaf}
        self._crowded = len(world.plan.jobs) > VISITED
        self._left_at: dict[str, float] = {}  # name -> when a hold of it was left to end by itself
        self._deaths = [fault.at for fault in world.plan.faults if fault.what in ("kill", "close")]

    def entered(self, lock: LockPlan) -> None:
        """A program has got a tenure."""
        for part in lock.parts:
            self._entered_at[part.name] = self._world.schedule.now

    def left(self, lock: LockPlan) -> None:
        """A program has dropped or detached its tenure."""
        for part in lock.parts:
            self._left_at[part.name] = self._world.schedule.now

    # -- after a release -----------------------------------------------------------------------------------------

    def released(self, lock: LockPlan) -> None:
        """A program gives its tenure back."""
        now = self._world.schedule.now
        if not self._world.plan.safe or not _is_watched(lock) or self._calm.since(now) > now:
            return
        waiting = [
            wait
            for wait in self._world.waiting
            if wait.lock.name == lock.name and _is_watched(wait.lock) and wait.began < now - SINCE
        ]
        if waiting and not any(has_no_majority(wait.client) for wait in waiting):
            polled = _POLLED if self._polls(waiting) else 0.0  # a waiter finds then that it was granted the name
            self._world.schedule.at(now + self._calm.within + polled, self._look_after, lock.name, now, waiting)

    def _look_after(self, name: str, since: float, waiting: Sequence[Wait]) -> None:
        if self._entered_at.get(name, -math.inf) >= since:
            return
        still = [wait for wait in waiting if wait in self._world.waiting]
        if any(has_no_majority(wait.client) for wait in still):
            return
        if still and all(wait.client in self._world.live() for wait in still):
            who = ", ".join(map(str, still))
            self._world.judge.fail("served late", f"{name} is free since {since:.6f}, and {who} wait")

    # -- at each look --------------------------------------------------------------------------------------------

    def look(self) -> None:
        """At all that wait."""
        now, waiting = self._world.schedule.now, self._world.waiting
        calm = self._calm.since(now)
        names = {part.name for wait in waiting for part in wait.lock.parts} if calm <= now else set[str]()
        holds = {name: self._holds(name) for name in names - self._uneven}
        writers = {part.name for wait in waiting for part in wait.lock.parts if part.kind.letter == WRITE.letter}
        polls = self._polls(waiting)
        for wait in waiting:
            watched = all(part.name in holds for part in wait.lock.parts) and not (polls and wait.lock.kind.parts)
            if not watched or has_no_majority(wait.client) or not _may_enter(wait.lock.parts, holds, writers):
                wait.free_since = math.inf
                continue
            others = [part for part in wait.lock.parts if part.kind.letter != READ.letter or part.name in writers]
            if any(self._entered_at.get(part.name, -math.inf) >= wait.free_since for part in others):
                wait.free_since = math.inf  # someone has entered, and left, since the last look
            wait.free_since = min(wait.free_since, now)
            since = max(wait.free_since, wait.began + SINCE, calm)
            if now - since > self._calm.within + self._renewal(wait) and wait.client in self._world.live():
                self._world.judge.fail("served late", f"{wait.lock.name} is free since {since:.6f}, and {wait} waits")

    def _polls(self, waiting: Iterable[Wait]) -> bool:
        """Whether some of them may get no notices."""
        return bool(self._world.plan.mute) or any(wait.client.slot in self._deaf for wait in waiting)

    def _renewal(self, wait: Wait) -> float:
        """Seconds until its waiter asks in any case, where no more is promised: behind more tickets of the dead than
        one op visits; and of readers and permits where a hold without an owner ends after those of others
        (docs/evidence.md)."""
        shared = {part.name for part in wait.lock.parts if part.kind.shared}
        now, lasts = self._world.schedule.now, 1.2 * self._world.plan.longest_lease + 3.0
        left = (*self._deaths, *(at for name in shared if (at := self._left_at.get(name)) is not None))
        without_owner = any(at <= now < at + lasts for at in left)
        return wait.lock.settings.lease / 3 if (shared and without_owner) or self._crowded else 0.0

    def _holds(self, name: str) -> list[tuple[Entry, ...]]:
        """At each server."""
        servers = self._world.servers
        return [server.states.get(name, _EMPTY).at(server.now()).holds for server in servers]


def _uneven(locks: Sequence[LockPlan]) -> set[str]:
    """The names of semaphores with several numbers of permits."""
    numbers: dict[str, set[int]] = {}
    for lock in locks:
        for part in lock.parts:
            numbers.setdefault(part.name, set()).add(part.kind.slots)
    return {name for name, found in numbers.items() if len(found) > 1}


def _may_enter(parts: Sequence[Part], holds: Mapping[str, Sequence[Sequence[Entry]]], writers: set[str]) -> bool:
    """Whether a majority of the servers would let it in now, at the slots of one choice."""
    of_parts = [holds[part.name] for part in parts]
    nodes = len(of_parts[0])
    for part, each in zip(parts, of_parts, strict=True):
        if part.kind.letter == READ.letter and part.name in writers and any(each):
            return False
    for slots in product(*(range(part.kind.slots or 1) if nodes > 1 else (-1,) for part in parts)):
        if 2 * sum(all(map(_admits, parts, node, slots)) for node in zip(*of_parts, strict=True)) > nodes:
            return True
    return False


def _admits(part: Part, holds: Sequence[Entry], slot: int) -> bool:
    """Whether a server with these holds lets one more in, at that slot (-1: any)."""
    if part.kind.slots:
        taken = any(wants(each.id)[1] == str(slot) for each in holds)
        return len(holds) < part.kind.slots and not taken
    return part.kind.admits(holds, f"{'':32}|{part.kind.mode}" if part.kind.mode else "")


def _is_watched(lock: LockPlan) -> bool:
    settings = lock.settings
    return lock.kind in (MUTEX, FAIR) and not (lock.reentrant or lock.once or settings.min_hold)
