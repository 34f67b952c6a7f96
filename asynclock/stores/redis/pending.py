"""The pending releases of a server: those that did not reach it, and the ids whose acquire may still reach it.

Both are bounded by time, since a key expires at the end of its lease, and by number. When there are too many, the
oldest entry is dropped, and its key stays until it expires.

The releases that reached it a short while ago are kept as well. After a failover another server is in its place, which
may lack the last writes of the one before: it has keys of holds that are released already. So the next connection sends
these releases again. They are the same ops, so no other id is released. An id is not used any more once its release was
sent, so a server that has carried it out does nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from asynclock.rules.model import ACQUIRE, ADOPT, RELEASE, WAIT, Op
from asynclock.stores.redis.handlers import CommandReply
from asynclock.stores.undelivered import GRACE, MOST, Limit, PendingRelease

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from asynclock.stores.port import ReplyHandler

MOST_SENT = 4096
"""The greatest number of releases that are kept after they were sent, 2 MB."""

LATELY = 2.0
"""Seconds for which a release is kept after it was sent. A replica is rarely further behind, and sentinels tell of a
switch within this time."""

_DROPPED = 64
"""The greatest number of expired ids that one release drops."""


class PendingReleases:
    """The pending releases of one node, the releases that it got lately, and the ids whose acquire was not answered."""

    def __init__(self) -> None:
        self.sent: deque[Op] = deque(maxlen=MOST_SENT)  # the releases that were sent last, the oldest first
        self._again: deque[Op] = deque(maxlen=MOST_SENT)  # those to send once more on the next connection
        self._releases: OrderedDict[str, PendingRelease] = OrderedDict()  # a dict takes O(n) to find its first entry
        self._limit = Limit()
        self.unanswered: OrderedDict[str, float] = OrderedDict()  # id, whose release leaves a tombstone -> until when

    def __len__(self) -> int:
        """The number of pending releases."""
        return len(self._releases)

    @property
    def to_send(self) -> int:
        """The number of releases that the next connection gets: those that are pending, and those to send again."""
        return len(self._releases) + len(self._again)

    def add(self, op: Op, now: float, sent: float) -> None:
        """Keep a release that could not be delivered, and was first sent at `sent`. If it was kept before, the time
        until which it is kept stays the same. One that marks a free name is not kept: `DoneMarks` sends it again."""
        if op.id not in self._releases and not op.marks_free:
            release = op if isinstance(op, PendingRelease) else PendingRelease(op, now, sent)
            if release.until > now:
                self._releases[op.id] = release
        self.prune(now)

    def cut_off(
        self, handlers: Collection[ReplyHandler | CommandReply], now: float, moved_at: float = math.inf
    ) -> None:
        """The connection of these handlers is lost, and the server had answered none of them since `moved_at`. Keep its
        releases, also those that were answered lately, and remember the ids of its other ops: the server may still read
        them from its socket."""
        self.send_again(handlers, now, moved_at)
        for handler in handlers:
            if isinstance(handler, CommandReply):
                continue
            op = handler.op
            if op.verb is RELEASE:
                self.add(op, now, handler.sent)
            elif op.verb in (ACQUIRE, WAIT, ADOPT):
                self.unanswered[op.id] = now + op.lease + GRACE
                self.unanswered.move_to_end(op.id)
        self.prune(now)

    def send_again(
        self, handlers: Collection[ReplyHandler | CommandReply], now: float, moved_at: float = math.inf
    ) -> None:
        """Send the releases of the last moments again, but not those of these handlers, which have no answer yet."""
        since = (min(moved_at, now) if handlers else now) - LATELY
        open_ops = {handler.op for handler in handlers if not isinstance(handler, CommandReply)}
        self._again.extend(
            op for op in self.sent if op.sent >= since and op not in open_ops and op.id not in self._releases
        )
        self.sent.clear()

    def was_unanswered(self, id: str, now: float) -> bool:
        """Whether the acquire of that id was not answered on an earlier connection. Some ids that have expired are
        dropped: no connection may be lost for a long time after an outage that left many."""
        for _ in range(_DROPPED):
            if not self.unanswered or next(iter(self.unanswered.values())) > now:
                break
            self.unanswered.popitem(last=False)
        return id in self.unanswered

    def prune(self, now: float) -> None:
        """Drop the entries that have expired, and the oldest of too many."""
        releases, unanswered = self._releases, self.unanswered
        while releases and (self._limit.is_exceeded(len(releases)) or next(iter(releases.values())).until <= now):
            releases.popitem(last=False)
        while unanswered and (len(unanswered) > MOST or next(iter(unanswered.values())) <= now):
            unanswered.popitem(last=False)
        while self._again and release_again(self._again[0]).until <= now:
            self._again.popleft()

    def take(self, wanted: Callable[[Op], bool]) -> list[PendingRelease]:
        """Remove and return the releases to send for which `wanted` is true: another server has their names now."""
        found = [release for release in self._releases.values() if wanted(release)]
        for release in found:
            del self._releases[release.id]
        again = [release_again(op) for op in self._again if wanted(op)]
        self._again = deque((op for op in self._again if not wanted(op)), MOST_SENT)
        return found + again

    def drain(self, now: float, most: int) -> list[PendingRelease]:
        """Remove and return the next releases to send, at most `most` of them, the oldest first."""
        found: list[PendingRelease] = []
        while self._releases and len(found) < most:
            release = self._releases.popitem(last=False)[1]
            found.append(release)
            release.sent = now
            self.sent.append(release)
        while self._again and len(found) < most:
            op = self._again.popleft()
            found.append(release_again(op))
            self.sent.append(op)  # with the time of its first sending, so that it is not sent again and again
        for release in found:
            release.send_at(now)
        return [release for release in found if release.until > now]


def release_again(op: Op) -> PendingRelease:
    """The op of a release that was sent, to send it once more."""
    return op if isinstance(op, PendingRelease) else PendingRelease(op, op.sent, op.sent)
