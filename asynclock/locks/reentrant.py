"""A mutex that its owner may enter again. On the wire it is a plain mutex; only this process knows the owner.

The owner is the task that acquired it, or the value of `owner=`. Entering again asks no server: it adds a tenure to the
same hold, with the same fencing token. The name is free once all these tenures were released. A child task is not its
parent: it waits, unless both give the same `owner=`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asynclock.locks.lock import Lock
from asynclock.protocol.terms import Terms

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable

    from asynclock._options import BoundOptions, LockSettings
    from asynclock.rules.model import Kind
    from asynclock.runtime.session import Session


class ReentrantLock(Lock):
    """A Lock that gives its owner another tenure of the hold that the owner has."""

    __slots__ = ("_owner",)

    def __init__(
        self,
        name: str,
        kind: Kind,
        options: BoundOptions,
        session_of: Callable[[asyncio.Task[Any] | None], Session],
        owner: Hashable,
    ) -> None:
        super().__init__(name, kind, options, session_of)
        self._owner = owner

    def _terms(self, settings: LockSettings, task: asyncio.Task[Any] | None, wait: float | None) -> Terms:
        owner = task if self._owner is None else self._owner
        return Terms(self._name, self._kind, settings, task, wait, owner)
