"""Holds: the holds of one session, by name, and what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asynclock._options import THREAD
from asynclock.protocol.core import SLICE
from asynclock.protocol.done_marks import DoneMarks
from asynclock.protocol.hold import Hold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from asynclock._options import LockSettings
    from asynclock.protocol.core import Core
    from asynclock.protocol.hold import Tenure
    from asynclock.protocol.local_queue import LocalQueues, YieldedNames
    from asynclock.protocol.watchdog import LoopLag, Watchdog
    from asynclock.quorum.ballot import Ballot


class Holds:
    """See the module. A name with several holds keeps them in a dict, so that removing one takes constant time."""

    __slots__ = ("_by_name", "_threaded", "core", "done_marks", "get", "lag", "queues", "watchdog", "yielded")

    def __init__(
        self,
        core: Core,
        watchdog: Watchdog,
        lag: LoopLag,
        queues: LocalQueues,
        yielded: YieldedNames,
        threaded: Callable[..., Hold] | None = None,
    ) -> None:
        self.core = core
        self.watchdog = watchdog
        self.lag = lag
        self.queues = queues
        self.yielded = yielded
        self._threaded = threaded or Hold  # makes those with renew="thread"
        self._by_name: dict[str, Hold | dict[Hold, None]] = {}
        self.get = self._by_name.get  # called for each acquire
        self.done_marks = DoneMarks(core, self.get)

    def __len__(self) -> int:
        """The number of names."""
        return len(self._by_name)

    def hold_of(self, settings: LockSettings, won: Ballot, token: int, contended: bool) -> Hold | None:
        """The hold of a ballot that was won; a majority are witnesses of its token. None: no validity is left, and it
        was released. `contended`: another client waits for it, as far as this client knows."""
        made_as = self._threaded if settings.renew == THREAD else Hold
        hold = made_as(self, settings, won, token, contended)
        if hold.round_trip_at < hold.valid_until:
            return hold
        hold.release()
        return None

    def all(self) -> list[Hold | dict[Hold, None]]:
        """All that there are now: each a hold, or the holds of one name. Fast, even for 100,000."""
        return list(self._by_name.values())

    def in_slices(self) -> Iterator[Hold | None]:
        """All holds that there are now; None after each slice of work: then the caller lets the loop run other tasks.
        References to a hold are dropped one by one, too, because freeing all of them at once would take long."""
        left = self.all()
        left.reverse()
        began = self.core.spent()
        while left:
            found = left.pop()
            for hold in tuple(found) if isinstance(found, dict) else (found,):
                if not hold.over:
                    yield hold
            if self.core.spent() - began > SLICE:
                yield None
                began = self.core.spent()

    def copied(self) -> list[Hold]:
        """All that there are now, for other threads than the loop's: `dict.copy` is atomic for them."""
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

    def has_of_task(self, name: str, task: Any) -> bool:
        """Whether that task holds the name. `==` and not `is`: the calls of one thread are equal."""
        return any(each.task == task and each.held for hold in self.of(name) for each in hold.tenures)

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
