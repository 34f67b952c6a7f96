"""What the tasks of one session share: its holds by name, and the first entries of reentrant locks."""

from __future__ import annotations

import logging
import time
import warnings
from contextvars import Context
from itertools import islice
from typing import TYPE_CHECKING

from asynclock._errors import brief

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Hashable, Iterable, Iterator

    from asynclock._clock import Clock, Timer
    from asynclock.acquire.acquisition import Acquisition
    from asynclock.acquire.hold import Hold
    from asynclock.acquire.tenure import Tenure

log = logging.getLogger("asynclock")

ENTRIES = 100
"""So many tasks of one owner enter in one turn of the loop."""

SLICE = 0.002
"""Seconds of work in one turn of the loop, for a task that has to do with all holds."""


class Holds:
    """The holds of one session, by name. A name with several holds keeps them in a dict, so that removing one takes
    constant time."""

    __slots__ = ("_by_name", "get")

    def __init__(self) -> None:
        self._by_name: dict[str, Hold | dict[Hold, None]] = {}
        self.get = self._by_name.get  # called for each acquire

    def __len__(self) -> int:
        """The number of names."""
        return len(self._by_name)

    def all(self) -> list[Hold | dict[Hold, None]]:
        """All that there are now: each a hold, or the holds of one name. Fast, even for 100,000."""
        return list(self._by_name.values())

    def in_slices(self) -> Iterator[Hold | None]:
        """All holds that there are now; None after each slice of work: then the caller lets the loop run other tasks.
        References to a hold are dropped one by one, too, because freeing all of them at once would take long."""
        left = self.all()
        left.reverse()
        began = time.perf_counter()
        while left:
            found = left.pop()
            for hold in tuple(found) if isinstance(found, dict) else (found,):
                if not hold.over:
                    yield hold
            if time.perf_counter() - began > SLICE:
                yield None
                began = time.perf_counter()

    def copied(self) -> list[Hold]:
        """All that there are now, for another thread than the loop's: `dict.copy` is one step for other threads."""
        found: dict[Hold, None] = {}
        for each in self._by_name.copy().values():
            found.update(each.copy() if isinstance(each, dict) else {each: None})
        return list(found)

    def of(self, name: str) -> Iterable[Hold]:
        """The holds of a name, oldest first."""
        found = self._by_name.get(name)
        return () if found is None else tuple(found) if isinstance(found, dict) else (found,)

    def tenures(self, name: str) -> list[Tenure]:
        """The tenures of a name, oldest first."""
        return [tenure for hold in self.of(name) for tenure in hold.tenures]

    def add(self, hold: Hold) -> None:
        for name in hold.names:
            known = self._by_name.get(name)
            if known is None:
                self._by_name[name] = hold
            elif isinstance(known, dict):
                known[hold] = None
            else:
                self._by_name[name] = {known: None, hold: None}

    def remove(self, hold: Hold) -> None:
        """Harmless for one that is not there."""
        for name in hold.names:
            known = self._by_name.get(name)
            if known is hold:
                del self._by_name[name]
            elif isinstance(known, dict):
                known.pop(hold, None)
                if not known:
                    del self._by_name[name]

    def warn_unclosed(self) -> None:
        """Warn of them: their event loop ends, and the program has not closed the client. Code that still works under
        one of their leases runs without the lock."""
        held = [hold.name for hold in self.in_slices() if hold and any(tenure.held for tenure in hold.tenures)]
        if not held:
            return
        which = f"{brief(held[0])} and {len(held) - 1:,} more" if len(held) > 1 else brief(held[0])
        log.warning(
            "asynclock: the event loop ended while the lease of %s was held, so it is released: work under a lease in "
            "the event loop that acquired it (asyncio.run and async_to_sync make a new one for each call)",
            which,
        )
        text = f"the lease of {which} was held at the end of its event loop: release it before, or close the client"
        warnings.warn(text, ResourceWarning, stacklevel=2)


class Entry:
    """A task of the owner of a reentrant lock asks for the hold. Other tasks of that owner wait for its end."""

    __slots__ = ("_waiters", "asker")

    def __init__(self, asker: Acquisition) -> None:
        self.asker = asker
        self._waiters: dict[Acquisition, Timer | None] = {}  # in their order

    def join(self, waiter: Acquisition) -> None:
        self._waiters[waiter] = None

    def call_at(self, waiter: Acquisition, clock: Clock, at: float) -> None:
        """The time of that waiter is up then."""
        self._waiters[waiter] = clock.call_at(at, waiter.owner_time_up)

    def leave(self, waiter: Acquisition) -> None:
        if (timer := self._waiters.pop(waiter, None)) is not None:
            timer.cancel()

    def ended(self, loop: asyncio.AbstractEventLoop) -> None:
        """Those that wait enter, too, or one of them asks and the others wait for it. In slices: other tasks of the
        loop run in between."""
        for waiter in list(islice(self._waiters, ENTRIES)):
            self.leave(waiter)
            waiter.owner_entered()
        if self._waiters:
            loop.call_soon(self.ended, loop, context=Context())


class Entries:
    """The first entries of the owners of reentrant locks that are under way."""

    __slots__ = ("_loop", "_under_way")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._under_way: dict[tuple[str, Hashable], Entry] = {}

    def get(self, name: str, owner: Hashable) -> Entry | None:
        """The entry under way; None: there is none."""
        return self._under_way.get((name, owner))

    def begin(self, asker: Acquisition) -> None:
        self._under_way[asker.terms.name, asker.terms.owner] = Entry(asker)

    def end(self, asker: Acquisition) -> None:
        """It has the hold, or gives up. Harmless for a task that does not ask for its owner."""
        key = asker.terms.name, asker.terms.owner
        if (entry := self._under_way.get(key)) is not None and entry.asker is asker:
            del self._under_way[key]
            self._loop.call_soon(entry.ended, self._loop, context=Context())
