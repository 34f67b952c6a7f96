"""Holds: the holds of one session, by name, and what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asynclock._options import THREAD
from asynclock.protocol.core import SLICE
from asynclock.protocol.done_marks import DoneMarks
from asynclock.protocol.hold import Hold
from asynclock.rules.model import ID_LENGTH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from asynclock._options import LockSettings
    from asynclock.protocol.core import Core
    from asynclock.protocol.hold import Tenure
    from asynclock.protocol.local_queue import LocalQueues, YieldedNames
    from asynclock.protocol.watchdog import LoopLag, Watchdog
    from asynclock.quorum.ballot import Ballot


class HoldsOfName(dict[str, Hold]):
    """The holds of a name that has had more than one at once, oldest first, by the random part of their ids. There may
    be thousands, so none is searched for. The tasks are known by their hashes: a reference to a task would keep its
    tenure from being collected."""

    __slots__ = ("_by_task", "_task_hash")

    def __init__(self) -> None:
        super().__init__()
        self._task_hash: dict[Hold, int | None] = {}
        self._by_task: dict[int | None, dict[Hold, None]] = {}

    def add(self, hold: Hold) -> None:
        self[hold.op.id[:ID_LENGTH]] = hold
        self._add_task(hold)

    def remove(self, hold: Hold) -> None:
        """Harmless for one that is not there."""
        if hold in self._task_hash:
            del self[hold.op.id[:ID_LENGTH]]
            self._remove_task(hold)

    def task_changed(self, hold: Hold) -> None:
        """Another task has its tenure."""
        if hold in self._task_hash:
            self._remove_task(hold)
            self._add_task(hold)

    def _add_task(self, hold: Hold) -> None:
        """Of a kind that several ids can hold, a hold has one tenure. A mutex is passed on, and entered again; it is
        one of few holds of its name."""
        shared = hold.op.kind.shared
        hashed = self._task_hash[hold] = next((hash(each.task) for each in hold.tenures), None) if shared else None
        self._by_task.setdefault(hashed, {})[hold] = None

    def _remove_task(self, hold: Hold) -> None:
        hashed = self._task_hash.pop(hold)
        holds = self._by_task[hashed]
        del holds[hold]
        if not holds:
            del self._by_task[hashed]

    def of_task(self, task: Any) -> Iterable[Hold]:
        """Those that this task may have."""
        return *self._by_task.get(hash(task), ()), *self._by_task.get(None, ())


class Holds:
    """See the module."""

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
        self._by_name: dict[str, Hold | HoldsOfName] = {}
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

    def all(self) -> list[Hold | HoldsOfName]:
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
            holds = list(found.values())[::-1] if isinstance(found, HoldsOfName) else [found]
            while holds:
                hold = holds.pop()
                if not hold.over:
                    yield hold
                if self.core.spent() - began > SLICE:
                    yield None
                    began = self.core.spent()

    def copied(self) -> list[Hold]:
        """All that there are now, for other threads than the loop's: `dict.copy` is atomic for them."""
        found: dict[Hold, None] = {}
        for each in self._by_name.copy().values():
            found.update(dict.fromkeys(each.copy().values()) if isinstance(each, HoldsOfName) else {each: None})
        return list(found)

    def of(self, name: str) -> Iterable[Hold]:
        """The holds of a name, oldest first."""
        found = self._by_name.get(name)
        return () if found is None else tuple(found.values()) if isinstance(found, HoldsOfName) else (found,)

    def with_id(self, name: str, id: str) -> Hold | None:
        """The hold of a name whose id begins with this random part; None: there is none."""
        found = self._by_name.get(name)
        if isinstance(found, HoldsOfName):
            return found.get(id)
        return found if found is not None and found.op.id.startswith(id) else None

    def tenures(self, name: str) -> list[Tenure]:
        """The tenures of a name, oldest first."""
        return [tenure for hold in self.of(name) for tenure in hold.tenures]

    def has_of_task(self, name: str, task: Any) -> bool:
        """Whether that task has a tenure of the name."""
        return any(self._of_task(name, task))

    def number_of_task(self, name: str, task: Any) -> int:
        """How many tenures of the name that task has."""
        return sum(self._of_task(name, task))

    def _of_task(self, name: str, task: Any) -> Iterator[bool]:
        """For each tenure that it may be: whether that task has it. `==` and not `is`: the calls of one thread are
        equal."""
        found = self._by_name.get(name)
        holds = found.of_task(task) if isinstance(found, HoldsOfName) else () if found is None else (found,)
        return (each.task == task and each.held for hold in holds for each in hold.tenures)

    def add(self, hold: Hold) -> None:
        for name in hold.names:
            known = self._by_name.get(name)
            if known is None:
                self._by_name[name] = hold
            elif isinstance(known, HoldsOfName):
                known.add(hold)
            else:
                self._by_name[name] = both = HoldsOfName()
                both.add(known)
                both.add(hold)

    def remove(self, hold: Hold) -> None:
        """Harmless for one that is not there."""
        for name in hold.names:
            known = self._by_name.get(name)
            if known is hold:
                del self._by_name[name]
            elif isinstance(known, HoldsOfName):
                known.remove(hold)
                if not known:
                    del self._by_name[name]

    def task_changed(self, hold: Hold) -> None:
        """Another task has its tenure."""
        for name in hold.names:
            if isinstance(known := self._by_name.get(name), HoldsOfName):
                known.task_changed(hold)
