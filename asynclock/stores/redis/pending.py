"""What a server still has to forget: releases that did not reach it, and ids whose acquire may yet.

Both are bounded: by time, since a key expires at the end of its lease, and by number. When there are too many, the
oldest entry is dropped, and its key stays until it expires."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from asynclock.rules.model import ACQUIRE, ADOPT, RELEASE, WAIT, Op, Queueing, Serve
from asynclock.stores.redis.connection import CommandReply

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asynclock.stores.port import ReplyHandler

log = logging.getLogger("asynclock")

MOST = 200_000
"""The greatest number of entries of each sort: more than a process holds at once. They take 100 MB."""

_GRACE = 60.0
"""An undelivered release is dropped this many seconds after its lease. The key that it would delete has expired."""

_SERVING = {
    serve: Queueing(serve, contended=True) for serve in Serve
}  # of a release that was kept: it puts no ticket back


class PendingRelease(Op):
    """A release that a server still has to carry out. It leaves a tombstone, and puts no ticket back."""

    __slots__ = ("rests_until", "until")

    def __init__(self, op: Op, now: float, sent: float) -> None:
        super().__init__(op.verb, op.kind, op.name, op.id, op.lease, op.fence, op.memory, tombstone=True, done=op.done)
        self.queueing = _SERVING[op.queueing.serve]
        self.rests_until = sent + op.rest  # min_hold counts from the release, not from its delivery
        self.until = now + op.lease + _GRACE


class PendingReleases:
    """One node's."""

    def __init__(self) -> None:
        self._releases: OrderedDict[str, PendingRelease] = OrderedDict()  # a dict takes O(n) to find its first entry
        self._warned = False
        self.unanswered: OrderedDict[str, float] = OrderedDict()  # id, to be released with a tombstone -> until when

    def __len__(self) -> int:
        """How many releases are kept."""
        return len(self._releases)

    def add(self, op: Op, now: float, sent: float) -> None:
        """Keep a release, first sent at `sent`, that could not be delivered. One that was kept before, and is
        refused again, is kept for no longer than at first."""
        if op.id not in self._releases:
            release = op if isinstance(op, PendingRelease) else PendingRelease(op, now, sent)
            if release.until > now:
                self._releases[op.id] = release
        self.prune(now)

    def cut_off(self, handlers: Iterable[ReplyHandler | CommandReply], now: float) -> None:
        """The connection on which these waited for their answers is gone. An acquire, or a ticket, may still sit in
        the server's socket."""
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
        """Drop what is over, the oldest first, and what is too much."""
        releases, unanswered = self._releases, self.unanswered
        if len(releases) > MOST and not self._warned:
            self._warned = True
            log.warning(
                "asynclock: more than %d releases wait for a server: the oldest of these locks end by time", MOST
            )
        while releases and (len(releases) > MOST or next(iter(releases.values())).until <= now):
            releases.popitem(last=False)
        while unanswered and (len(unanswered) > MOST or next(iter(unanswered.values())) <= now):
            unanswered.popitem(last=False)

    def drain(self, now: float, most: int) -> list[PendingRelease]:
        """The next releases to send, the oldest first; at most so many. They are kept no longer."""
        found: list[PendingRelease] = []
        while self._releases and len(found) < most:
            release = self._releases.popitem(last=False)[1]
            if release.until > now:
                release.rest = max(0.0, release.rests_until - now)
                found.append(release)
        return found
