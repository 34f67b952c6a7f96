"""How long a waiter is passed over: nobody waits for a lock of one name for much longer than all the others together
hold it. A client that polls over several nodes has no place in the queue, so it does not count."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from asynclock.rules.model import CLOCK_SKEW

if TYPE_CHECKING:
    from simulation.clients import Client
    from simulation.plan import Fault, Job, Plan
    from simulation.world import World

TURNS = 20
"""Each of the others has the lock so often before a waiter gets it, at most: a client passes it on inside its process
up to 15 times, and over several nodes the waiters compete for a name that is free."""

LEAST = 5.0
"""Seconds that a waiter may always wait."""


class _Wait(NamedTuple):
    """A job waits for its lock."""

    job: Job
    client: Client
    since: float


class _Present(NamedTuple):
    """A job that wants a name, or has it."""

    until: float  # when others are free to enter; inf: it waits or has it
    seconds: float  # that its tenure takes


class Starvation:
    """Watches the waiters without a timeout."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waits: dict[tuple[Client, int], _Wait] = {}
        self._present: dict[str, dict[tuple[Client, int], _Present]] = {}  # by the name and the job
        plan = world.plan
        clocks = [min(max(each.wall_offset, -CLOCK_SKEW), CLOCK_SKEW) for each in plan.clients]
        self._skew = max(clocks) - min(clocks) + 0.1 if len(plan.nodes) > 1 else 0.0
        self.worst = 0.0  # share of what it may wait that a waiter has waited
        self._polls = {slot for slot in range(len(plan.clients)) if _polls(plan, slot)}

    def waits(self, job: Job, client: Client) -> None:
        """A job waits for its lock."""
        key, now = (client, job.number), self._world.schedule.now
        for part in job.lock.parts:
            present = self._present.setdefault(part.name, {})
            present[key] = _Present(math.inf, _seconds(job, self._world.plan))
        if job.timeout is None and not job.lock.kind.parts and client.slot not in self._polls:
            self._waits.setdefault(key, _Wait(job, client, now))

    def waits_no_more(self, job: Job, client: Client) -> None:
        """It has its tenure, or gives up."""
        wait = self._waits.pop((client, job.number), None)
        if wait is not None:
            self._check(wait)

    def ended(self, job: Job, client: Client) -> None:
        """It has given its tenure back, or dropped it: then the name stays taken for a time."""
        key = client, job.number
        for part in job.lock.parts:
            present = self._present.get(part.name, {})
            if key in present:
                known = present[key]
                present[key] = known._replace(until=self._world.schedule.now + known.seconds)

    def look(self) -> None:
        """At the waiters of each name that wait for the longest."""
        seen = set[str]()
        for wait in self._waits.values():
            if wait.job.lock.name not in seen:
                seen.add(wait.job.lock.name)
                self._check(wait)

    def _check(self, wait: _Wait) -> None:
        waited = self._world.schedule.now - wait.since
        if waited <= LEAST:
            return
        most = self._most(wait)
        self.worst = max(self.worst, waited / most)
        if waited > most:
            about = f"job {wait.job.number} of {wait.client.name}, {waited:.3f} s for {wait.job.lock.name}"
            self._world.judge.fail("starved", f"{about}, where {most:.3f} s were enough")

    def _most(self, wait: _Wait) -> float:
        """The seconds for which it may wait."""
        plan, now = self._world.plan, self._world.schedule.now
        own = wait.client, wait.job.number
        present = self._present[wait.job.lock.name].items()
        work = sum(each.seconds for key, each in present if each.until >= wait.since and key != own)
        troubles = sum(_trouble(each, plan) for each in plan.faults if _matters(each, plan, wait.since, now))
        return LEAST + self._skew + TURNS * work + troubles


def _polls(plan: Plan, slot: int) -> bool:
    """Whether no majority of several nodes notifies that client."""
    nodes = range(len(plan.nodes))
    listens = [node for node in nodes if node not in plan.mute and (slot, node) not in plan.deaf]
    return len(nodes) > 1 and 2 * len(listens) <= len(nodes)


def _seconds(job: Job, plan: Plan) -> float:
    """For which the tenure of a job keeps its name, at most."""
    lock = job.lock
    left = 0.0
    if job.ends_by != "release" or job.cancelled_after is not None:
        left = job.holds_for + plan.longest_lease + sum(after for after, _ in job.adopters)
    return job.holds_for + lock.settings.min_hold + lock.once + left + 20 * plan.delay


def _trouble(fault: Fault, plan: Plan) -> float:
    """The seconds for which a fault may hold waiters up."""
    return abs(fault.seconds) + plan.settings.max_lease + plan.longest_lease + 1.0


def _matters(fault: Fault, plan: Plan, since: float, now: float) -> bool:
    return fault.at <= now and fault.at + _trouble(fault, plan) + plan.settings.max_lease >= since
