"""How soon a waiter is served: a name does not stay free while somebody waits for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asynclock.rules.mutex import FAIR, MUTEX

if TYPE_CHECKING:
    from simulation.clients import Client
    from simulation.plan import Fault, Job, LockPlan, Plan
    from simulation.world import World

_SINCE = 0.5
"""A waiter counts that has waited for so many seconds: then its ticket is at the servers."""

_WITHIN, _TRIPS = 0.3, 40
"""Someone enters within so many seconds, and so many times the mean delay of a message, after the name became free:
several attempts, if votes split."""


class Promptness:
    """Watches the names of mutexes. It does not look near a fault: a ticket of a client that is gone, or a hold that a
    server could not be told to release, delays the waiters until it expires."""

    def __init__(self, world: World) -> None:
        plan = world.plan
        self._world = world
        self._within = _WITHIN + _TRIPS * plan.delay
        self._waits: dict[int, tuple[str, float, Client]] = {}  # job -> the name, since when, and where
        self._entered_at: dict[str, float] = {}
        self._troubled = [(each.at - self._within, each.at + each.seconds + _after(each, plan)) for each in plan.faults]
        self._counts = plan.safe and not plan.mute

    def waits(self, job: Job, client: Client) -> None:
        """A job waits for its lock."""
        if _is_watched(job.lock):
            self._waits[job.number] = job.lock.name, self._world.schedule.now, client

    def ended(self, job: Job) -> None:
        """It waits no more."""
        self._waits.pop(job.number, None)

    def entered(self, lock: LockPlan) -> None:
        """A program has got a tenure."""
        for part in lock.parts:
            self._entered_at[part.name] = self._world.schedule.now

    def released(self, lock: LockPlan) -> None:
        """A program gives its tenure back."""
        now = self._world.schedule.now
        if not self._counts or not _is_watched(lock) or any(begin <= now < end for begin, end in self._troubled):
            return
        waiting = [job for job, (name, since, _) in self._waits.items() if name == lock.name and since < now - _SINCE]
        if waiting and not any(_has_no_majority(self._waits[job][2]) for job in waiting):
            self._world.schedule.at(now + self._within, self._look, lock.name, now, waiting)

    def _look(self, name: str, since: float, waiting: list[int]) -> None:
        if self._entered_at.get(name, -math.inf) >= since:
            return
        still = [(job, self._waits[job][2]) for job in waiting if job in self._waits]
        if any(_has_no_majority(client) for _, client in still):
            return
        if still and all(client in self._world.live() for _, client in still):
            who = ", ".join(f"job {job} of {client.name}" for job, client in still)
            self._world.judge.fail("served late", f"{name} is free since {since:.6f}, and {who} wait")


def _has_no_majority(client: Client) -> bool:
    """An idle client learns of restarts with its next op, and waits for max_lease from then. A node that votes again
    gets a waiter's ticket with its next round."""
    since = client.clock.now() - _SINCE
    return 2 * len([node for node in client.nodes if node.votes_since > since]) >= len(client.nodes)


def _after(fault: Fault, plan: Plan) -> float:
    """Seconds after its end for which a fault may hold up waiters."""
    if fault.what in ("slow", "errors", "noscript", "wall", "break"):
        return 2.0
    if fault.what in ("cut", "partition", "isolate", "alone", "kill", "close", "stop", "freeze"):
        return 1.2 * plan.longest_lease + 3.0  # until the tickets and the holds of that time have ended
    return plan.settings.max_lease + 1.2 * plan.longest_lease + 5.0  # a server that restarts casts no vote at first


def _is_watched(lock: LockPlan) -> bool:
    settings = lock.settings
    return lock.kind in (MUTEX, FAIR) and not (lock.reentrant or lock.once or settings.min_hold)
