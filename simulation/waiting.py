"""How an acquire without a tenure ends: not too soon, in time, and for a reason."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asynclock.protocol.planner import COLLISIONS
from asynclock.rules.model import ID_LENGTH, TAG_LENGTH, parts_of
from asynclock.rules.rwlock import READ
from simulation.calm import has_no_majority

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asynclock.protocol.hold import Tenure
    from asynclock.rules.model import Op, Part, State
    from simulation.clients import Client
    from simulation.plan import Job, LockPlan
    from simulation.world import World

_TICK = 0.001
"""Seconds for the turns of the loop in which a timer leads to an end."""

_RECENT = 0.1
"""Seconds before the end of its time in which a waiter asks for the last time, at least (`planner.answer_from`)."""

_KIND = slice(0, ID_LENGTH + 2)
"""Of an id: its random part, and the letter of its kind."""


class Wait:
    """An acquire of a program that has not ended."""

    def __init__(self, job: Job, client: Client) -> None:
        self.job = job
        self.client = client
        self.lock: LockPlan = job.lock
        self.began = client.world.schedule.now
        self.called: float = client.clock.now()
        self.beside = False  # its client had one of the names, or another acquire of it, meanwhile
        self.heard: float = client.clock.true_time(min(node.answered_at for node in client.nodes))  # from each node
        self.free_since = math.inf  # since which look it might have entered (`promptness.py`)
        self.asks_since = self.called  # by its client's clock: since then its process does not have one of the names

    def __str__(self) -> str:
        return f"job {self.job.number} of {self.client.name}"


class Waiting:
    """The acquires that have not ended."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._calm = world.calm
        self._waits: dict[Wait, None] = {}
        self._refusable: dict[str, int] = {}  # name -> so many that have a timeout wait for it
        self._seen: dict[str, dict[str, float]] = {}  # name -> id of a hold or of a ticket -> when it was there last
        self._entered: set[str] = set()  # the holds of programs, by the random part of their ids
        self._ended: dict[tuple[str, str], float] = {}  # client, name -> when an acquire ended last

    def __bool__(self) -> bool:
        return bool(self._waits)

    def __iter__(self) -> Iterator[Wait]:
        return iter(self._waits)

    def __contains__(self, wait: Wait) -> bool:
        return wait in self._waits

    # -- an acquire ----------------------------------------------------------------------------------------------

    def begins(self, job: Job, client: Client) -> Wait:
        """A program acquires a lock."""
        wait = Wait(job, client)
        names = {part.name for part in job.lock.parts}
        for other in self._waits:
            if other.client is client and not names.isdisjoint(part.name for part in other.lock.parts):
                wait.beside = other.beside = True
        for name in names:
            lately = self._ended.get((client.tag, name), -math.inf) > wait.began - self._calm.within
            if lately or client.machine.holds.get(name) is not None:
                wait.beside = True
            if job.timeout is not None:
                self._refusable[name] = self._refusable.get(name, 0) + 1
        self._waits[wait] = None
        return wait

    def ends(self, wait: Wait) -> None:
        """With a tenure or without, or its process has ended."""
        del self._waits[wait]
        for part in wait.lock.parts:
            self._ended[wait.client.tag, part.name] = self._world.schedule.now
            if wait.job.timeout is not None:
                self._refusable[part.name] -= 1
                if not self._refusable[part.name]:
                    del self._refusable[part.name]
                    self._seen.pop(part.name, None)

    def entered(self, tenure: Tenure) -> None:
        """A program has got a tenure."""
        self._entered.add(tenure.hold.op.id[:ID_LENGTH])

    # -- how long it may take ------------------------------------------------------------------------------------

    def check_in_time(self, wait: Wait) -> None:
        """It has ended by itself. With a timeout it does so at the end of it, or when a loop that was stopped runs
        again. Then a last question may take a node timeout, and in a local queue the answer that it waits for one
        more. With timeout=0 the one round may take a node timeout after the last message of a node, again after an
        interruption, for which it waits as long as an attempt to connect may take, and for other slots."""
        client, timeout = wait.client, wait.job.timeout
        if timeout is None or client.closed:
            return
        now, within = client.clock.now(), client.within(wait.lock.settings)
        resumed = now - client.clock.rate * (self._world.schedule.now - client.loop.runs_since)
        since = max(wait.called + timeout, resumed)
        rounds = 3 + COLLISIONS * any(part.kind.slots for part in wait.lock.parts)
        last = rounds * within + client.settings.connect_timeout
        most = (2 if resumed > wait.called else 1) * within if timeout else last
        if now > since + most + _TICK:
            about = f"{wait} of {wait.lock.name}: {now - wait.called:.3f} s (timeout={timeout:g})"
            self._world.judge.fail("an acquire ended late", about)

    def look(self) -> None:
        """At all that wait: none waits for longer while no majority answers than its client is patient. It asks with
        each renewal of its ticket, and a round or an interruption before that may last as long as it may."""
        for wait in self._waits:
            client, lock = wait.client, wait.lock
            if any(client.machine.holds.get(part.name) is not None for part in lock.parts):
                wait.asks_since = client.clock.now()
            if client.closed or client.loop.is_stopped or lock.reentrant:
                continue
            now = client.clock.now()
            resumed = now - client.clock.rate * (self._world.schedule.now - client.loop.runs_since)
            answered = sorted((node.answered_at for node in client.nodes), reverse=True)[len(client.nodes) // 2]
            since = max(wait.asks_since, resumed, answered)
            asks = lock.settings.lease / 3 + 2 * client.within(lock.settings) + client.settings.connect_timeout
            if now > since + client.settings.patience + asks + _TICK and client in self._world.live():
                about = f"{wait} of {lock.name}: no majority has answered for {now - since:.3f} s"
                self._world.judge.fail("an outage outlasts the patience", about)

    # -- why -----------------------------------------------------------------------------------------------------

    def seen(self, op: Op, before: Sequence[State], after: Sequence[State], now: float) -> None:
        """A server, whose time is `now`, has carried out that op."""
        for part, *states in zip(parts_of(op), before, after, strict=True):
            if part.name in self._refusable:
                seen = self._seen.setdefault(part.name, {})
                for state in states:
                    for hold in state.holds:
                        if hold.ends is None or hold.ends > now:
                            seen[hold.id] = self._world.schedule.now
                    for ticket in state.queue:
                        if ticket.ends > now:
                            seen[ticket.id] = self._world.schedule.now

    def check_reason(self, wait: Wait, outage: str = "") -> None:
        """It was refused, or ended by an outage. While nothing goes wrong there is no outage. Then what was refused has
        met something at one of the names: a hold, a ticket, a mark of a rest, or an acquire of its own client."""
        now, client = self._world.schedule.now, wait.client
        if client.closed or not self._calm.lasts(wait.began, now):
            return
        if has_no_majority(client, client.clock.now() - wait.called + self._calm.within):
            return
        if outage and not self._may_be_answered(wait):
            return
        about = f"{wait} of {wait.lock.name} (timeout={wait.job.timeout}), called at {wait.began:.6f}"
        if outage:
            self._world.judge.fail("an outage without a fault", f"{about}: {outage}")
        elif not wait.beside and not any(self._is_obstacle(wait, part) for part in wait.lock.parts):
            self._world.judge.fail("refused without a reason", about)

    def _may_be_answered(self, wait: Wait) -> bool:
        """Whether its time was enough for the slowest answer, with that of each node and of the last question. The
        connections of an idle client may have ended in an earlier fault: its first op finds that out. Of a reentrant
        lock a task asks when another task of its owner has given up: perhaps just before the end of its own time."""
        within, timeout = wait.client.within(wait.lock.settings), wait.job.timeout
        if timeout is not None and (
            wait.heard < self._calm.since(self._world.schedule.now) or (wait.lock.reentrant and wait.beside)
        ):
            return False
        return self._calm.slowest + _TICK <= (min(timeout / 2, within, _RECENT) if timeout else within)

    def _is_obstacle(self, wait: Wait, part: Part) -> bool:
        """Whether others have kept it out of that name. Over N nodes one of them is enough for a permit, if the time is
        too short for another slot."""
        seen = self._seen.get(part.name, {})
        others = {each[_KIND] for each, at in seen.items() if at >= wait.began and self._is_of_others(wait, each)}
        if part.kind.letter == READ.letter:  # readers do not keep each other out
            others = {each for each in others if each[-1:] != READ.letter}
        has_time = len(wait.client.nodes) == 1 or not 0 < (wait.job.timeout or 0) < self._calm.within
        return len(others) >= (part.kind.slots if part.kind.slots and has_time else 1)

    def _is_of_others(self, wait: Wait, its_id: str) -> bool:
        """Not of this acquire: its client had no other acquire of this name."""
        return its_id[:TAG_LENGTH] != wait.client.tag or its_id[:ID_LENGTH] in self._entered
