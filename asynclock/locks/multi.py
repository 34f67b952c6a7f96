"""Several locks as one: all of them, or none. A client never waits for one name while it holds another, in whatever
order the names are given. So no two clients wait for each other: there is no circular wait (Coffman, Elphick and
Shoshani, "System Deadlocks", Computing Surveys 3, 1971).

A node grants all names or none, in one script. Over N nodes, an attempt without a majority is undone before the client
waits. The waiter leaves its ticket at the name that refused it. It is notified when that name is free, and then tries
for all names again. (On ZooKeeper a waiter that was overtaken holds its nodes for a limited time while it waits:
`stores/zookeeper/hold_and_wait.py`.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from asynclock._errors import ConfigError, brief
from asynclock.locks.lock import Lock
from asynclock.rules.model import Part

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    from asynclock._options import BoundOptions
    from asynclock.quorum.ballot import Ballot
    from asynclock.rules.model import Kind, Rule, Slots
    from asynclock.runtime.session import Session

MOST_NAMES = 256
"""The most names of one multi lock. The server runs nothing else while it checks them all."""


class Multi:
    """The names, each with its kind, in an order that all clients share."""

    name = "multi"
    letter = "multi"
    fair = False
    shared = True
    mode = ""
    slot = None
    max_per_task = 1
    deadlock_hint = "release it first, and then ask for all of them at once"

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = tuple(sorted(parts, key=lambda part: part.name))
        self.respects_queue = any(part.kind.respects_queue for part in self.parts)
        sizes = [part.kind.slots or 1 for part in self.parts]
        self.slots = math.prod(sizes) if any(part.kind.slots for part in self.parts) else 0

    def at(self, slot: int) -> Multi:
        """The same names, for an attempt at one slot of each kind that has slots. `slot` is one number for all of them:
        divmod by the slots of each part in turn gives that part's slot."""
        parts: list[Part] = []
        for part in self.parts:
            slot, digit = divmod(slot, part.kind.slots or 1)
            parts.append(Part(part.name, part.kind.at(digit)))
        return Multi(parts)

    def choose(self, taken: Sequence[Slots], spare: int, random: Callable[[], float]) -> int | None:
        """The slots to try next, as one number. A name is an obstacle if so many nodes refused because of it that no
        majority can grant. None: no obstacle has another slot that may be free."""
        slot, size = 0, 1
        found = False
        for index, part in enumerate(self.parts):
            if not part.kind.slots:
                continue
            refused = [slots for slots in taken if slots.part == index]
            digit = part.kind.choose(refused, spare, random) if len(refused) > spare else None
            found = found or digit is not None
            if digit is None:
                digit = int(random() * part.kind.slots)
            slot, size = slot + digit * size, size * part.kind.slots
        return slot if found else None


class MultiLock(Lock):
    """A Lock of several names; its Lease holds them all, with one fencing token."""

    __slots__ = ()

    def __init__(
        self,
        kind: Multi,
        options: BoundOptions,
        session_of: Callable[[asyncio.Task[Any] | None], Session],
    ) -> None:
        super().__init__(", ".join(part.name for part in kind.parts), kind, options, session_of)

    def _peeks(self, session: Session) -> list[tuple[Kind, Ballot]]:
        asked = super()._peeks(session)
        if len(session.quorum.nodes) > 1:  # there the slots of each name need a majority of their own
            slotted = [part for part in self._parts if part.kind.slots]
            asked += [(each.kind, self._peek_at(session, each.kind, each.name)) for each in slotted]
        return asked


def parts_of(
    locks: Sequence[object], mutex: Rule, session_of: object, check_name: Callable[[object], str]
) -> list[Part]:
    """The names of these locks and their kinds; a str is a mutex. Raises ConfigError."""
    if not 0 < len(locks) <= MOST_NAMES:
        raise ConfigError(f"multi() of {len(locks) or 'no'} locks: name 1 to {MOST_NAMES}, as in multi('a', 'b')")
    parts: list[Part] = []
    for lock in locks:
        part = lock._part(session_of) if isinstance(lock, Lock) else Part(check_name(lock), mutex)
        if part is None:
            raise ConfigError(f"{lock!r} cannot be part of a multi lock: give its names, or plain locks of them")
        parts.append(part)
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"multi() has {brief(name)} twice: name each lock once", name=name)
    return parts
