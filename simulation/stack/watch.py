"""What must not last while nothing goes wrong: a hold that nobody knows, and a free name for which somebody waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynclock.rules.model import TAG_LENGTH
from asynclock.rules.mutex import FAIR, MUTEX
from simulation.stack.checks import PREFIX

if TYPE_CHECKING:
    from simulation.plan import Fault, Job, LockPlan
    from simulation.stack.clients import Client
    from simulation.stack.plan import StackPlan
    from simulation.stack.servers import Server
    from simulation.stack.world import World

_ORPHAN = 1.5
"""Seconds for which a server may keep a hold that its client does not have."""

_WAITED = 0.5
"""A waiter counts that has waited for so many seconds: then its ticket is at the servers."""

_WITHIN, _TRIPS = 0.6, 40
"""A free name is entered within so many seconds, and so many times the mean delay of a message."""

_AT_ONCE = ("rst", "half-open", "noscript", "kill", "close", "look", "break", "cancel")

_RECOVERS = {
    "look": 0.0,
    "break": 0.0,
    "half-open": 9.0,
    "partition": 5.0,
    "isolate": 5.0,
    "errors": 9.0,
    "crash": 6.0,
    "freeze": 4.0,
    "stop": 3.0,
    "failover": 12.0,
    "move": 4.0,
}
"""Seconds after the end of a fault in which a client connects again, and delivers what it could not deliver."""


class Watch:
    """See the module. It does not look near a fault."""

    def __init__(self, world: World) -> None:
        plan = world.plan
        self._world = world
        self._orphans: dict[tuple[Server, bytes, str], float] = {}
        self._waits: dict[int, tuple[LockPlan, float, Client]] = {}
        self._free_since: dict[str, float] = {}
        self._troubled_until = self._slow_until = 0.0
        self._within = _WITHIN + _TRIPS * plan.delay

    def waits(self, job: Job, client: Client) -> None:
        self._waits[job.number] = job.lock, self._world.schedule.now, client

    def ended(self, job: Job) -> None:
        self._waits.pop(job.number, None)

    def entered(self, lock: LockPlan) -> None:
        for part in lock.parts:
            self._free_since.pop(part.name, None)

    def fault(self, fault: Fault) -> None:
        """It begins."""
        now = self._world.schedule.now
        ends = now + (0.0 if fault.what in _AT_ONCE else fault.seconds)
        self._troubled_until = max(self._troubled_until, ends + _recovers(fault))
        self._slow_until = max(self._slow_until, ends + _after(fault, self._world.plan))

    def look(self) -> None:
        if not self._world.plan.safe:
            return
        now = self._world.schedule.now
        if now < self._troubled_until:
            self._orphans.clear()
        else:
            self._look_at_holds(now)
        if now < self._slow_until:
            self._free_since.clear()
        else:
            self._look_at_waiters(now)

    def _look_at_holds(self, now: float) -> None:
        world = self._world
        found: dict[tuple[Server, bytes, str], float] = {}
        live = {client.tag: client for client in world.live() if client.tag}
        for server in world.servers:
            for key in list(server.keys.values):
                if key.startswith(PREFIX + b"asynclock~"):
                    continue
                for its_id in server.holders(key):
                    client = live.get(its_id[:TAG_LENGTH])
                    if client is not None and not world.judge.has(its_id) and not client.loop.is_stopped:
                        where = server, key, its_id
                        found[where] = self._orphans.get(where, now)
                        if now - found[where] > _ORPHAN:
                            about = f"{its_id[12:18]} of {client.name} in {key.decode()} at {server.label}"
                            world.judge.fail("a hold that nobody knows", about)
        self._orphans = found

    def _look_at_waiters(self, now: float) -> None:
        world = self._world
        waited: dict[str, int] = {}
        for job, (lock, since, client) in self._waits.items():
            if (
                _is_watched(lock)
                and now - since > _WAITED
                and client is world.clients[client.slot]
                and not client.closed
            ):
                waited.setdefault(lock.name, job)
        for name in [name for name in self._free_since if name not in waited]:
            del self._free_since[name]
        for name, job in waited.items():
            if any(server.holders(PREFIX + name.encode()) for server in world.servers):
                self._free_since.pop(name, None)
                continue
            since = self._free_since.setdefault(name, now)
            if now - since > self._within:
                world.judge.fail("served late", f"{name} is free since {since:.3f}, and job {job} waits")


def _recovers(fault: Fault) -> float:
    return _RECOVERS.get(fault.what.partition(" ")[0], 3.0)


def _after(fault: Fault, plan: StackPlan) -> float:
    """Seconds after its end for which a fault may hold up waiters. A server that restarts casts no vote at first."""
    what = fault.what.partition(" ")[0]
    if what == "kill":  # the hold and the ticket of a dead client end with their lease
        return 1.2 * plan.longest_lease + 3.0
    restarts = what == "crash" and plan.deployment in ("three", "five")
    return 1.5 + _recovers(fault) + (1.2 * plan.longest_lease + float(plan.options["max_lease"]) if restarts else 0.0)


def _is_watched(lock: LockPlan) -> bool:
    settings = lock.settings
    return lock.kind in (MUTEX, FAIR) and settings.fencing and not settings.min_hold
