"""One run: it builds the deployment of a plan, lets the jobs and the faults of the plan happen, and then heals all."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from random import Random
from time import process_time
from typing import TYPE_CHECKING, NamedTuple

from simulation.calm import Assumptions, Calm
from simulation.checks import Flaw, Judge
from simulation.clients import Client
from simulation.faults import Faults
from simulation.handovers import Handovers
from simulation.histories import Histories
from simulation.loop import Schedule
from simulation.network import Link
from simulation.plan import Job
from simulation.promptness import Promptness
from simulation.servers import Server
from simulation.starvation import Starvation
from simulation.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simulation.plan import Plan

_PROBE = 1_000_000
"""The number of the first job after all others."""

_LOOKS = 0.5
"""Seconds between two looks of the judge at all tenures."""


class Outcome(NamedTuple):
    """The result of a run."""

    flaw: Flaw | None
    calls: int
    faults: int
    seconds: float  # simulated; those after the end of the plan do not count
    cpu: float
    trace: tuple[str, ...] = ()
    histories: int = 0  # that were checked
    undecided: int = 0  # of these, for which the search took too many steps


class World:
    """See the module."""

    def __init__(self, plan: Plan, *, tracing: bool = False) -> None:
        self.plan = plan
        self.tracing = tracing
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        self.schedule = Schedule()
        self.judge = Judge(self, plan.settings.max_lease)
        self.calm, self.assumptions = Calm(plan), Assumptions(plan)
        self.waiting = Waiting(self)
        self.handovers = Handovers(self)
        self.promptness = Promptness(self)
        self.starvation = Starvation(self)
        self.histories = Histories(self)
        self.waits: dict[int, Client] = {}  # the jobs that wait for a lock
        self.servers = [
            Server(index, self.schedule, self.random_of(f"server {index}"), self.judge, node.rate, node.offset)
            for index, node in enumerate(plan.nodes)
        ]
        for server in self.servers:
            server.may_publish = server.index not in plan.mute
            server.deaf = frozenset(client for client, node in plan.deaf if node == server.index)
            server.mark = "" if plan.new else server.run_id
            server.started = 0.0 if plan.new else server.started
        self.links = {
            (slot, server.index): Link(self.schedule, self.random_of(f"link {slot} {server.index}"), plan.delay)
            for slot in range(len(plan.clients))
            for server in self.servers
        }
        self.clients: list[Client | None] = [None] * len(plan.clients)
        for slot in range(len(plan.clients)):
            self.start(slot)
        self._faults = Faults(self)

    def random_of(self, whose: str) -> Random:
        """Numbers for one part of the world, so that another part does not change them."""
        return Random(f"{self.plan.seed} {whose}")  # noqa: S311 - they are to be repeated

    def count(self, what: str) -> int:
        """One more of that."""
        self.counts[what] += 1
        return self.counts[what]

    def trace(self, who: str, what: str) -> None:
        if self.tracing:
            self.lines.append(f"{self.schedule.now:12.6f}  {who:<12}  {what}")

    def called(self, who: str, what: str) -> None:
        """A program calls a function of its client."""
        self.counts["calls"] += 1
        self.trace(who, what)

    # -- clients -------------------------------------------------------------------------------------------------

    def start(self, slot: int) -> None:
        """A process begins."""
        if self.clients[slot] is None:
            client = self.clients[slot] = Client(self, slot, self.count(f"client {slot}"))
            for job in self.plan.jobs:
                if job.client == slot and job.at < self.schedule.now < job.until:
                    client.loop.post(client.begin, job)

    def end(self, slot: int, *, at_once: bool) -> None:
        """A process ends: killed, or closed."""
        client, self.clients[slot] = self.clients[slot], None
        if client is None:
            return
        if at_once:
            client.kill()
        else:
            client.loop.post(client.close)

    def live(self) -> Iterator[Client]:
        return (client for client in self.clients if client is not None)

    def detached(self, job: Job, handle: str) -> None:
        """A program has sent a handle to others."""
        for after, slot in job.adopters:
            self.counts["handles"] += 1
            self.schedule.at(self.schedule.now + after, self._adopt, job, handle, slot)

    def _adopt(self, job: Job, handle: str, slot: int) -> None:
        self.counts["handles"] -= 1
        if (client := self.clients[slot]) is not None:
            client.loop.post(client.adopt, job, handle)

    def _begin(self, job: Job) -> None:
        self.counts["jobs"] += 1
        if (client := self.clients[job.client]) is not None:
            client.loop.post(client.begin, job)

    def ended(self, job: Job, client: Client) -> None:
        """A task has done that job, or its process has ended."""
        self.starvation.ended(job, client)
        if job.turns > 1 and self.schedule.now < job.until and not client.loop.dead:
            client.loop.later(client.begin, replace(job, turns=job.turns - 1))

    # -- the run -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the first flaw."""
        plan, schedule = self.plan, self.schedule
        for job in plan.jobs:
            schedule.at(job.at, self._begin, job)
        for fault in plan.faults:
            schedule.at(fault.at, self._faults.begin, fault)
        schedule.at(_LOOKS, self._look)
        self._run_until(plan.seconds)
        self.trace("world", "all heals")
        self._faults.heal()
        if not self._run_while(self._is_busy, self._patience):
            self.judge.waits_too_long()
        if not self._run_while(self._is_unsettled, 30.0):
            self.judge.fail("not settled", "a node does not connect again")
        self._run_until(schedule.now + 2.0)
        if self.judge.flaw is None:
            self.judge.nothing_is_left()
        self._run_until(schedule.now + 1.1 * plan.longest_lease + 20.0)
        if self.judge.flaw is None:
            self.judge.nothing_is_stored()
        if self.judge.flaw is None:
            self.histories.check()
        self._all_are_served()

    def _all_are_served(self) -> None:
        """Long after all has healed each client gets each lock. The first acquire may meet a server whose restart its
        client had no occasion to learn of: then there is no majority until the holds that it forgot have ended."""
        for last in (False, True):
            wanted = [(client, lock) for client in self.live() for lock in self.plan.locks]
            for number, (client, lock) in enumerate(wanted):
                job = Job(_PROBE + number, self.schedule.now, client.slot, lock, None, 0.0)
                client.loop.post(client.probe if last else client.begin, job)
            if not self._run_while(self._is_busy, self._patience + 2.0 * len(wanted)):
                self.judge.waits_too_long()
            self._run_until(self.schedule.now + self.plan.settings.max_lease + 2.0)

    def _look(self) -> None:
        self.judge.look()
        if self.waiting:
            self.waiting.look()
            self.promptness.look()
        self.starvation.look()
        self.schedule.at(self.schedule.now + _LOOKS, self._look)

    def _has_flaw(self) -> bool:
        return self.judge.flaw is not None

    def _run_until(self, when: float) -> None:
        self.schedule.run(when, self._has_flaw)

    def _run_while(self, busy: object, seconds: float) -> bool:
        """Whether it ends in that time."""
        assert callable(busy)  # noqa: S101
        until = self.schedule.now + seconds
        while busy() and not self._has_flaw():
            if self.schedule.now >= until:
                return False
            self._run_until(self.schedule.now + 0.25)
        return True

    def _is_busy(self) -> bool:
        to_begin = self.counts["jobs"] < len(self.plan.jobs) or self.counts["handles"] > 0
        return to_begin or any(client.tasks or client.loop.is_stopped for client in self.live())

    def _is_unsettled(self) -> bool:
        settled = all(node.is_settled for client in self.live() for node in client.nodes)
        return not settled or any(client.machine.holds.done_marks for client in self.live())

    @property
    def _patience(self) -> float:
        """Seconds within which each waiter is served after all has healed: those that the quarantine and the leases of
        the dead take, and the holds of those before it, or the times for which their runs of `once` count as done."""
        work = max([15.0, *(lock.once + 1.0 for lock in self.plan.locks)]) * len(self.waits)
        return self.plan.settings.max_lease + 3 * self.plan.longest_lease + 30.0 + work


def simulate(plan: Plan, *, tracing: bool = False) -> Outcome:
    """Run a plan. The collector is off: it would run at moments that differ from run to run."""
    began = process_time()
    enabled = gc.isenabled()
    gc.disable()
    try:
        world = World(plan, tracing=tracing)
        world.run()
    finally:
        if enabled:
            gc.enable()
    seconds = min(world.schedule.now, plan.seconds)
    lines = tuple(world.lines)
    return Outcome(
        world.judge.flaw, world.counts["calls"], world.counts["faults"], seconds, process_time() - began, lines,
        world.counts["histories"], world.counts["undecided"],
    )  # fmt: skip
