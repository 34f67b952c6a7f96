"""The pending releases of a server: those that did not reach it, and the ids whose acquire may still reach it.

Both are bounded by time, since a key expires at the end of its lease, and by number. When there are too many, the
oldest entry is dropped, and its key stays until it expires."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from asynclock.rules.model import ACQUIRE, ADOPT, CONTENDED, RELEASE, WAIT, Op
from asynclock.stores.redis.connection import CommandReply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asynclock.stores.port import ReplyHandler

log = logging.getLogger("asynclock")

MOST = 200_000
"""The greatest number of entries of each sort, more than a process holds at once. So many take 100 MB."""

_GRACE = 60.0
"""Seconds after the end of its lease when an undelivered release is dropped. The key that it would delete has
expired."""


class PendingRelease(Op):
    """A release that a server still has to carry out. It leaves a tombstone, and puts no ticket back."""

    __slots__ = ("rests_until", "until")

    def __init__(self, op: Op, now: float, sent: float) -> None:
        super().__init__(op.verb, op.kind, op.name, op.id, op.lease, op.fence, op.memory, tombstone=True, done=op.done)
        self.queueing = CONTENDED[op.queueing.serve]
        self.rests_until = sent + op.rest  # min_hold counts from the release, not from its delivery
        self.until = now + op.lease + _GRACE


class PendingReleases:
    """The pending releases of one node, and the ids whose acquire was not answered."""

    def __init__(self) -> None:
        self._releases: OrderedDict[str, PendingRelease] = OrderedDict()  # a dict takes O(n) to find its first entry
        self._warned = False
        self.unanswered: OrderedDict[str, float] = OrderedDict()  # id, whose release leaves a tombstone -> until when

    def __len__(self) -> int:
        """The number of pending releases."""
        return len(self._releases)

    def add(self, op: Op, now: float, sent: float) -> None:
        """Keep a release that could not be delivered, and was first sent at `sent`. If it was kept before, the time
        until which it is kept stays the same."""
        if op.id not in self._releases:
            release = op if isinstance(op, PendingRelease) else PendingRelease(op, now, sent)
            if release.until > now:
                self._releases[op.id] = release
        self.prune(now)

    def cut_off(self, handlers: Iterable[ReplyHandler | CommandReply], now: float) -> None:
        """The connection of these handlers is lost. Keep its releases, and remember the ids of its other ops: the
        server may still read them from its socket."""
        for handler in handlers:
            if isinstance(handler, CommandReply):
                continue
            op = handler.op
            if op.verb is RELEASE:
                self.add(op, now, handler.sent)
            elif op.verb in (ACQUIRE, WAIT, ADOPT):
                self.unanswered[op.id] = now + op.lease + _GRACE
                self.unanswered.move_to_end(op.id)
        self.prune(now)

    def prune(self, now: float) -> None:
        """Drop the entries that have expired, and the oldest of too many."""
        releases, unanswered = self._releases, self.unanswered
        if len(releases) > MOST and not self._warned:
            self._warned = True
            log.warning("asynclock: more than %d releases are pending for a server: the oldest are dropped", MOST)
        while releases and (len(releases) > MOST or next(iter(releases.values())).until <= now):
            releases.popitem(last=False)
        while unanswered and (len(unanswered) > MOST or next(iter(unanswered.values())) <= now):
            unanswered.popitem(last=False)

    def take(self, wanted: Callable[[str], bool]) -> list[PendingRelease]:
        """Remove and return the releases of the names for which `wanted` is true: another server has these names
        now."""
        found = [release for release in self._releases.values() if wanted(release.name)]
        for release in found:
            del self._releases[release.id]
        return found

    def drain(self, now: float, most: int) -> list[PendingRelease]:
        """Remove and return the next releases to send, at most `most` of them, the oldest first."""
        found: list[PendingRelease] = []
        while self._releases and len(found) < most:
            release = self._releases.popitem(last=False)[1]
            if release.until > now:
                release.rest = max(0.0, release.rests_until - now)
                found.append(release)
        return found
