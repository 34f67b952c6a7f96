"""A mutex that its owner may enter again. On the wire it is a plain mutex; only this process knows the owner.

The owner is the task that acquired it, or the value of `owner=`. Entering again asks no server: it adds a tenure to the
same hold, with the same fencing token. The name is free once all these tenures were released. A child task is not its
parent: it waits, unless both give the same `owner=`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asynclock._clock import wait_ended
from asynclock.acquire.causes import NoLease
from asynclock.locks.lock import Lock

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable

    from asynclock._options import LockSettings
    from asynclock.acquire.session import Session
    from asynclock.acquire.tenure import Tenure, Terms
    from asynclock.rules.model import Kind


class ReentrantLock(Lock):
    """A Lock that gives its owner another tenure of the hold that the owner has."""

    __slots__ = ("_owner",)

    def __init__(
        self,
        name: str,
        kind: Kind,
        settings: LockSettings,
        session_of: Callable[[asyncio.Task[Any] | None], Session],
        owner: Hashable,
    ) -> None:
        super().__init__(name, kind, settings, session_of)
        self._owner = owner

    async def _take(self, session: Session, terms: Terms) -> Tenure | NoLease:
        terms.owner = owner = terms.task if self._owner is None else self._owner
        clock, entries, timeout = session.clock, session.entries, terms.timeout
        began = clock.now()
        give_up = None if timeout is None else began + timeout
        while (entering := entries.get(self._name, owner)) is not None:  # another task of this owner asks
            left = None if give_up is None else max(0.0, give_up - clock.now())
            await wait_ended(entering, left, clock)
            if not entering.done():
                return NoLease(waited=clock.now() - began)
        held = [each for each in session.holds.tenures(self._name) if each.terms.owner == owner and each.held]
        if held:
            return held[-1].hold.enter_again(held[-1], terms)
        if give_up is not None and timeout:
            terms.timeout = max(1e-6, give_up - clock.now())
        waited = clock.now() - began
        entries.begin(self._name, owner)
        try:
            taken = await super()._take(session, terms)
            return taken._replace(waited=waited + taken.waited) if isinstance(taken, NoLease) else taken
        finally:
            entries.end(self._name, owner)
