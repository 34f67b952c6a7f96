"""A detached hold can be adopted."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from asynclock.protocol.handover import parse_handle
from asynclock.rules.model import ID_LENGTH

if TYPE_CHECKING:
    from simulation.clients import Client
    from simulation.plan import Job
    from simulation.world import World


class Adopting(NamedTuple):
    """An adoption that a program has asked for."""

    handle: str
    job: Job  # that has detached the hold
    client: Client
    called: float  # by the client's clock


class Handovers:
    """The handles of a run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._detached_at: dict[str, float] = {}
        self._adoptions: dict[str, int] = {}  # handle -> so many were begun

    def detached(self, handle: str) -> None:
        """A program has the handle."""
        self._detached_at[handle] = self._world.schedule.now

    def adopts(self, handle: str, job: Job, client: Client) -> Adopting:
        """A program adopts the hold."""
        self._adoptions[handle] = self._adoptions.get(handle, 0) + 1
        return Adopting(handle, job, client, client.clock.now())

    def check_failed(self, adopting: Adopting, error: Exception) -> None:
        """The only adoption of a handle does not fail, while nothing goes wrong: from the extension before the detach
        until now. The servers keep the hold, and nobody has broken it."""
        world, client = self._world, adopting.client
        began, key = self._detached_at[adopting.handle], parse_handle(adopting.handle).id[:ID_LENGTH]
        lasts = world.judge.granted_until(key) > world.schedule.now and not world.judge.was_broken(key)
        calm = world.calm.lasts(began - world.calm.within, world.schedule.now)
        asked = client.clock.now() - adopting.called + world.calm.within
        if not world.calm.is_answered(error, client.within(adopting.job.lock.settings)):
            return
        if self._adoptions[adopting.handle] > 1 or not (lasts and calm) or client.closed:
            return
        if all(node.votes_since <= client.clock.now() - asked for node in client.nodes):  # those that have it, too
            world.judge.fail("an adoption failed", f"{client.name}, hold of job {adopting.job.number}: {error!r}")
