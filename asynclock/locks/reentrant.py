"""A mutex that its owner may enter again: on the wire it is the mutex; who owns it is known to this process alone.

The owner is the task that took it, or what `owner=` names. Entering again asks no server: it is one more tenure of the
same hold, with the same fencing token, and the name is free when as many were given back as were taken. A child task is
not its parent: it waits, unless both name one owner.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from asynclock.locks.lock import Lock

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from asynclock._options import LockSettings
    from asynclock.acquire.session import Session
    from asynclock.locks.lease import Lease
    from asynclock.rules.model import Kind


class ReentrantLock(Lock):
    """A Lock that answers its owner with another tenure of what it holds."""

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

    async def _take(self, session: Session, task: asyncio.Task[Any] | None, timeout: float | None) -> Lease | None:
        owner = task if self._owner is None else self._owner
        key = self._name, owner
        loop, give_up = session.loop, None if timeout is None else session.clock.now() + timeout
        while (entering := session.entering.get(key)) is not None:  # another task of this owner asks
            left = None if give_up is None else max(0.0, give_up - session.clock.now())
            await asyncio.wait({entering}, timeout=left)
            if not entering.done():
                return None
        held: list[Lease] = [lease for lease in session.leases(self._name) if lease._owner == owner and lease.held]
        if held:
            return held[-1]._again(self, task, self._settings)
        entering = session.entering[key] = loop.create_future()
        try:
            left = timeout if give_up is None or not timeout else max(1e-6, give_up - session.clock.now())
            lease = await super()._take(session, task, left)
        finally:
            del session.entering[key]
            entering.set_result(None)
        if lease is not None:
            lease._owner = owner
        return lease
