"""The releases that a node could not deliver, and when each of them is sent again. No I/O, but for one log line.

A hold whose release failed stays until its lease ends, although its owner has left. So the release is kept for that
time and a minute. It may have been carried out, if only its answer was lost: it is sent again all the same. Ids are
never used again, so it ends no other hold. It leaves a tombstone, because the acquire that it undoes may still arrive.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from asynclock.rules.model import CONTENDED, Op, parts_of

log = logging.getLogger("asynclock")

MOST = 200_000
"""The greatest number of releases that a node keeps, more than a process holds at once. So many take 100 MB."""

GRACE = 60.0
"""Seconds after the end of its lease when an undelivered release is dropped. The key that it would delete has
expired."""

PAUSES = (0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.0)
"""Seconds until a release is sent again: after its first failure, after its second, and so on."""

_DROPPED = 100
"""The greatest number of releases that are dropped in one turn of the event loop. Thousands may expire at once."""


class PendingRelease(Op):
    """A release that a server still has to carry out. It leaves a tombstone, unless it was answered before, and puts no
    ticket back. It does not mark a free name (`Op.marks_free`): the name may have had another owner meanwhile."""

    __slots__ = ("rests_until", "until")

    def __init__(self, op: Op, now: float, sent: float, *, answered: bool = False) -> None:
        super().__init__(
            op.verb, op.kind, op.name, op.id, op.lease, op.fence, op.memory, tombstone=not answered, done=op.done > 0
        )
        self.queueing = CONTENDED[op.queueing.serve]
        self.rests_until = sent + op.rest  # min_hold counts from the release, not from its delivery
        self.until = now + op.lease + GRACE

    def send_at(self, now: float) -> None:
        """It is sent now: set what is left of its rest."""
        self.rest = max(0.0, self.rests_until - now)
        self.packed = None


class Limit:
    """Whether a node keeps too many releases. The log says so once."""

    __slots__ = ("_warned",)

    def __init__(self) -> None:
        self._warned = False

    def is_exceeded(self, number: int) -> bool:
        """Whether so many are too many."""
        if number > MOST and not self._warned:
            self._warned = True
            log.warning("asynclock: more than %d releases are pending for a server: the oldest are dropped", MOST)
        return number > MOST


class _Kept:
    """A release, and when it is due."""

    __slots__ = ("due", "failures", "release", "retries", "under_way")

    def __init__(self, release: PendingRelease) -> None:
        self.release = release
        self.failures = 0  # since the last retry
        self.retries = 0  # the calls of `all_due` before it failed last
        self.due = 0.0
        self.under_way = False


class Undelivered:
    """The undelivered releases of one node. Times are of the client's clock. No call takes longer the more releases are
    kept: there is a queue for each pause, so the releases of a queue become due in order."""

    def __init__(self) -> None:
        self.error: Exception | None = None  # of the last one that failed
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # by id, the oldest first
        self._ids: dict[str, dict[str, None]] = {}  # by name
        self._queues: list[OrderedDict[str, _Kept]] = [OrderedDict() for _ in PAUSES]  # those that are not under way
        self._retries = 0
        self._retried = 0.0  # the time of the last one
        self._limit = Limit()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, op: Op, now: float, sent: float, error: Exception, *, answered: bool = False) -> None:
        """Keep a release that was first sent at `sent`, and failed. `answered`: it was carried out, and may have been
        undone."""
        self.error = error
        if op.id not in self._kept:
            kept = self._kept[op.id] = _Kept(PendingRelease(op, now, sent, answered=answered))
            for name in _names(op):
                self._ids.setdefault(name, {})[op.id] = None
            self._wait(kept, now)
        self._prune(now)

    def before(self, op: Op, now: float) -> list[PendingRelease]:
        """The releases to send now, because an op of their names follows. Those that are under way are sent already."""
        ids = dict.fromkeys(each for name in _names(op) for each in self._ids.get(name, ()))
        return [self._sent(kept, now) for each in ids if not (kept := self._kept[each]).under_way]

    def take(self, now: float) -> PendingRelease | None:
        """The release to send now; None: none is due, or many have expired, and `due_at` tells to ask again."""
        self._prune(now)
        for _ in range(_DROPPED):
            kept = self._next()
            if kept is None or self._due_of(kept) > now:
                return None
            if kept.release.until > now:
                return self._sent(kept, now)
            self.delivered(kept.release)
        return None

    def due_at(self) -> float | None:
        """When the next one is due; None: none is kept, or all are under way."""
        kept = self._next()
        return None if kept is None else self._due_of(kept)

    def delivered(self, release: PendingRelease) -> None:
        """Its server has carried it out, or it need not be carried out any more."""
        if (kept := self._kept.pop(release.id, None)) is None:
            return
        self._queues[kept.failures].pop(release.id, None)
        for name in _names(release):
            ids = self._ids[name]
            del ids[release.id]
            if not ids:
                del self._ids[name]

    def failed(self, release: PendingRelease, now: float, error: Exception) -> None:
        """It failed again: it is due after a longer pause, unless its time is over."""
        self.error = error
        if (kept := self._kept.get(release.id)) is None:
            return
        before = kept.failures if kept.retries == self._retries else 0
        kept.failures = min(before + 1, len(PAUSES) - 1)
        self._wait(kept, now)

    def all_due(self, now: float) -> None:
        """The cause of their failures may be over. All are due now, with the shortest pause."""
        self._retries += 1
        self._retried = now

    def _wait(self, kept: _Kept, now: float) -> None:
        kept.under_way = False
        kept.retries = self._retries
        kept.due = now + PAUSES[kept.failures]
        self._queues[kept.failures][kept.release.id] = kept

    def _next(self) -> _Kept | None:
        """The one that is due first."""
        return min((next(iter(queue.values())) for queue in self._queues if queue), key=self._due_of, default=None)

    def _due_of(self, kept: _Kept) -> float:
        return kept.due if kept.retries == self._retries else min(kept.due, self._retried)

    def _sent(self, kept: _Kept, now: float) -> PendingRelease:
        del self._queues[kept.failures][kept.release.id]
        kept.under_way = True
        kept.release.send_at(now)
        return kept.release

    def _prune(self, now: float) -> None:
        """Drop those that have expired, and the oldest of too many."""
        for _ in range(_DROPPED):
            oldest = next(iter(self._kept.values())).release if self._kept else None
            if oldest is None or (not self._limit.is_exceeded(len(self._kept)) and oldest.until > now):
                return
            self.delivered(oldest)


def _names(op: Op) -> list[str]:
    return [part.name for part in parts_of(op)]
