"""One run: it builds the deployment of a plan, lets the jobs and the faults of the plan happen, and then heals all."""

from __future__ import annotations

import gc
import math
from collections import Counter
from random import Random
from time import process_time
from typing import TYPE_CHECKING, Any

from simulation.loop import Schedule
from simulation.stack.checks import StackJudge
from simulation.stack.clients import Client
from simulation.stack.deployments import Deployment
from simulation.stack.faults import Faults
from simulation.stack.histories import StackHistories
from simulation.stack.network import Network
from simulation.stack.patches import in_virtual_time
from simulation.stack.watch import Watch
from simulation.world import Outcome

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterator

    from simulation.plan import Job
    from simulation.stack.loop import StackLoop
    from simulation.stack.plan import StackPlan

_LOOKS = 0.25
"""Seconds between two looks of the judge at all tenures."""

_TURNS = 3_000_000
"""Of all loops in one run. More than these never end."""


class World:
    """See the module."""

    def __init__(self, plan: StackPlan, *, tracing: bool = False) -> None:
        self.plan = plan
        self.tracing = tracing
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        self.schedule = Schedule()
        self.random = self.random_of("world")
        self.seen_from: StackLoop | None = None  # the process whose clock the judge reads
        self.network = Network(self.schedule, self.random_of, plan.delay)
        self.waits: dict[int, Client] = {}  # the jobs that wait for a lock
        self.deployment = Deployment(self)
        self.judge = StackJudge(self)
        self.histories = StackHistories(self)
        self.watch = Watch(self)
        self.clients: list[Client | None] = [None] * len(plan.clients)
        self._all: list[Client] = []  # also those that have ended
        for slot in range(len(plan.clients)):
            self.start(slot)
        self._faults = Faults(self)

    @property
    def servers(self) -> list[Any]:
        return self.deployment.stored

    def random_of(self, whose: str) -> Random:
        """Numbers for one part of the world, so that another part does not change them."""
        return Random(f"{self.plan.seed} {whose}")  # noqa: S311 - they are to be repeated

    def count(self, what: str) -> int:
        """One more of that."""
        self.counts[what] += 1
        return self.counts[what]

    def trace(self, who: str, what: str) -> None:
        if self.tracing:
            self.lines.append(f"{self.schedule.now:12.6f}  {who:<14}  {what}")

    def called(self, who: str, what: str) -> None:
        """A program calls a function of its client."""
        self.counts["calls"] += 1
        self.trace(who, what)

    def logged_error(self, who: str, record: logging.LogRecord) -> None:
        """The library logs an error: something that should not happen."""
        why = record.exc_info[1] if record.exc_info else None
        self.judge.fail("an error was logged", f"{who}: {record.getMessage()} ({why!r})")

    # -- clients -----------------------------------------------------------------------------------------------------

    def start(self, slot: int) -> None:
        """A process begins."""
        if self.clients[slot] is None:
            client = self.clients[slot] = Client(self, slot, self.count(f"client {slot}"))
            self._all.append(client)

    def end(self, slot: int, killed: bool, *, silent: bool) -> None:
        """A process ends: killed, or it closes its client."""
        client, self.clients[slot] = self.clients[slot], None
        if client is None:
            return
        if killed:
            client.kill(silent=silent)
        else:
            client.loop.post(client.close)

    def gone(self, client: Client) -> None:
        """It has closed, and was checked."""
        self.trace(client.name, "is gone")

    def live(self) -> Iterator[Client]:
        return (client for client in self.clients if client is not None)

    def detached(self, job: Job, handle: str) -> None:
        """A program has sent a handle to others."""
        for after, slot in job.adopters:
            self.schedule.at(self.schedule.now + after, self._adopt, job, handle, slot)

    def _adopt(self, job: Job, handle: str, slot: int) -> None:
        if (client := self.clients[slot]) is not None:
            client.loop.post(client.adopt, job, handle)

    def _begin(self, job: Job) -> None:
        if (client := self.clients[job.client]) is not None:
            client.loop.post(client.begin, job)

    # -- time --------------------------------------------------------------------------------------------------------

    def _run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let happen what happens until that time, or until `stop` is true."""
        schedule = self.schedule
        while self.judge.flaw is None and not stop():
            at, who = math.inf, None
            for client in self._all:
                when = client.loop.next_at()
                if when < at:
                    at, who = when, client
            if min(at, schedule.next_at) > until:
                break
            if who is None or schedule.next_at <= at:
                schedule.step()
                continue
            schedule.now = max(schedule.now, at)
            who.loop.turn()
            if who.loop.errors:
                self.judge.fail("an error reached the event loop", f"{who.name}: {who.loop.errors[0]}")
            if self.count("turns") > _TURNS:
                self.judge.fail("a loop without an end", who.name)
        if self.judge.flaw is None and not stop():
            schedule.now = max(schedule.now, until)

    def _look(self) -> None:
        self.judge.look()
        self.histories.look()
        self.watch.look()
        self.schedule.at(self.schedule.now + _LOOKS, self._look)

    # -- a run -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The whole plan; it ends at the first flaw."""
        with in_virtual_time(self):
            try:
                self._run_plan()
            finally:
                self._bury()

    def _run_plan(self) -> None:
        plan, schedule, judge = self.plan, self.schedule, self.judge
        for job in plan.jobs:
            schedule.at(job.at, self._begin, job)
        for fault in plan.faults:
            schedule.at(fault.at, self._faults.begin, fault)
        schedule.at(_LOOKS, self._look)
        self._run(plan.seconds)
        self.trace("fault", "all heals")
        self._faults.heal()
        self._run(schedule.now + self._patience, lambda: not self._is_busy())
        if self._is_busy():
            judge.waits_too_long()
        self._run(schedule.now + 10.0)
        if judge.flaw is None:
            judge.nothing_is_left()
        for slot in range(len(self.clients)):
            self.end(slot, False, silent=False)
        self._run(schedule.now + 6.0)
        self._run(schedule.now + plan.options["max_lease"] + 2 * plan.longest_lease + 2.0)
        if judge.flaw is None:
            judge.nothing_is_stored()
        if judge.flaw is None:
            self.histories.check()

    def _is_busy(self) -> bool:
        return any(client.tasks or client.loop.is_stopped for client in self.live())

    @property
    def _patience(self) -> float:
        """Seconds within which each waiter is served after all has healed: those that the quarantine and the leases of
        the dead take, and the holds of those before it."""
        return float(self.plan.options["max_lease"]) + 3 * self.plan.longest_lease + 30.0 + 9.0 * len(self.waits)

    def _bury(self) -> None:
        """Let all that is left end, so that nothing of this run happens later."""
        flaw, self.judge.flaw = self.judge.flaw, None
        tracing, self.tracing = self.tracing, False
        self.judge.fail = lambda what, about: None  # type: ignore[method-assign]
        for client in self._all:
            client.bury()
        self._run(self.schedule.now + 8.0)
        for client in self._all:
            client.loop.errors.clear()
            client.loop.close()
        self.judge.flaw, self.tracing = flaw, tracing


def simulate(plan: StackPlan, *, tracing: bool = False) -> Outcome:
    """Run a plan. Garbage is collected before and after it, not at moments that differ from run to run."""
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
