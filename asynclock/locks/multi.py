"""Several locks as one: all of them, or none. Whatever the order in which they are named, nobody waits for one while it
holds another, so no two can wait for each other (the circular wait of Coffman, Elphick and Shoshani, "System
Deadlocks", Computing Surveys 3, 1971, cannot come to be).

A node lets in, or refuses, in one script; over N nodes an attempt that has no majority for all is given back before
anything is waited for. Who waits does so at the name that refused it, is called when that is free, and then tries for
all again.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

from asynclock._errors import ConfigError, brief
from asynclock.locks.lock import Lock
from asynclock.rules.model import Part

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from asynclock._options import LockSettings
    from asynclock.acquire.session import Session
    from asynclock.acquire.tenure import Tenure, Terms
    from asynclock.rules.model import Rule, Slots
    from asynclock.stores.port import Refused

MOST = 256
"""So many names at most: the server does nothing else while it looks at them all."""


class Multi:
    """The names, each with its kind, in an order that all clients share."""

    name = "multi"
    letter = "multi"
    fair = False
    shared = True
    mode = ""
    max_per_task = 1
    deadlock_hint = "release it first, and then ask for all of them at once"

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = tuple(sorted(parts, key=lambda part: part.name))
        sizes = [part.kind.slots or 1 for part in self.parts]
        self.slots = math.prod(sizes) if any(part.kind.slots for part in self.parts) else 0

    def at(self, slot: int) -> Multi:
        """The same, of an attempt for one slot of each that has some: `slot` has the slots as its digits."""
        parts: list[Part] = []
        for part in self.parts:
            slot, digit = divmod(slot, part.kind.slots or 1)
            parts.append(Part(part.name, part.kind.at(digit)))
        return Multi(parts)

    def choose(self, taken: Sequence[Slots], spare: int) -> int | None:
        """A slot, where it is one and the same name that refused at a majority, and that has others to give."""
        slot, size = 0, 1
        found = False
        for index, part in enumerate(self.parts):
            if not part.kind.slots:
                continue
            refused = [slots for slots in taken if slots.part == index]
            digit = part.kind.choose(refused, spare) if len(refused) > spare else None
            found = found or digit is not None
            if digit is None:
                digit = random.randrange(part.kind.slots)  # noqa: S311 - no secret
            slot, size = slot + digit * size, size * part.kind.slots
        return slot if found else None

    def respects_queue(self, id: str) -> bool:
        del id
        return False


class MultiLock(Lock):
    """A Lock of several names; its Lease holds them all, with one fencing token."""

    __slots__ = ()

    def __init__(
        self,
        kind: Multi,
        settings: LockSettings,
        session_of: Callable[[asyncio.Task[Any] | None], Session],
    ) -> None:
        super().__init__(", ".join(part.name for part in kind.parts), kind, settings, session_of)

    def _take(self, session: Session, terms: Terms) -> Coroutine[Any, Any, Tenure | Refused]:
        return super()._take(session, terms) if terms.timeout == 0 else self._take_beside(session, terms)


def parts_of(
    locks: Sequence[object], mutex: Rule, session_of: object, check_name: Callable[[object], str]
) -> list[Part]:
    """The names of these locks and their kinds; a str is a mutex. Raises ConfigError."""
    if not 0 < len(locks) <= MOST:
        raise ConfigError(f"multi() of {len(locks) or 'no'} locks: name 1 to {MOST}, as in multi('a', 'b')")
    parts: list[Part] = []
    for lock in locks:
        part = lock.__part__(session_of) if isinstance(lock, Lock) else Part(check_name(lock), mutex)
        if part is None:
            raise ConfigError(f"{lock!r} cannot be part of a multi: give the names it stands for, or a lock of them")
        parts.append(part)
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"multi() of {brief(name)} twice: name each lock once", name=name)
    return parts
