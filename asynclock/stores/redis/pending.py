"""What a server still has to forget: releases that did not reach it, and ids whose acquire may yet.

Both are bounded: by time, since a key expires at the end of its lease, and by number. When there are too many, the
oldest entry is dropped, and its key stays until it expires."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from asynclock.rules.model import ACQUIRE, ADOPT, RELEASE, WAIT, Op, Queueing, Serve
from asynclock.stores.redis.connection import Once

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asynclock.stores.port import Sink

log = logging.getLogger("asynclock")

MOST = 200_000
"""The greatest number of entries of each sort: more than a process holds at once. They take 100 MB."""

_GRACE = 60.0
"""An undelivered release is dropped this many seconds after its lease. The key that it would delete has expired."""

_SERVING = {serve: Queueing(serve, contended=True) for serve in Serve}  # of what is owed: it puts no ticket back


class Owed(Op):
    """A release that a server still has to carry out. It leaves a tombstone, and puts no ticket back."""

    __slots__ = ("rests_until", "until")

    def __init__(self, op: Op, now: float, sent: float) -> None:
        super().__init__(op.verb, op.kind, op.name, op.id, op.lease, op.fence, op.memory, tombstone=True, done=op.done)
        self.queueing = _SERVING[op.queueing.serve]
        self.rests_until = sent + op.rest  # min_hold counts from the release, not from its delivery
        self.until = now + op.lease + _GRACE


class Debts:
    """One node's."""

    def __init__(self) -> None:
        self._owed: OrderedDict[str, Owed] = OrderedDict()  # a dict takes O(n) to find its first entry
        self._warned = False
        self.orphans: OrderedDict[str, float] = OrderedDict()  # id, to be released with a tombstone -> until when

    def __len__(self) -> int:
        """How many releases are owed."""
        return len(self._owed)

    def owe(self, op: Op, now: float, sent: float) -> None:
        """Keep a release, first sent at `sent`, that could not be delivered. One that was owed before, and is refused
        again, is kept for no longer than at first."""
        if op.id not in self._owed:
            owed = op if isinstance(op, Owed) else Owed(op, now, sent)
            if owed.until > now:
                self._owed[op.id] = owed
        self.prune(now)

    def cut_off(self, sinks: Iterable[Sink | Once], now: float) -> None:
        """The connection on which these waited for their answers is gone. An acquire, or a ticket, may still sit in
        the server's socket."""
        for sink in sinks:
            if isinstance(sink, Once):
                continue
            op = sink.op
            if op.verb is RELEASE:
                self.owe(op, now, sink.sent)
            elif op.verb in (ACQUIRE, WAIT, ADOPT):
                self.orphans[op.id] = now + op.lease + _GRACE
                self.orphans.move_to_end(op.id)
        self.prune(now)

    def prune(self, now: float) -> None:
        """Drop what is over, the oldest first, and what is too much."""
        owed, orphans = self._owed, self.orphans
        if len(owed) > MOST and not self._warned:
            self._warned = True
            log.warning(
                "asynclock: a server is owed more than %d releases: the oldest of these locks end by time", MOST
            )
        while owed and (len(owed) > MOST or next(iter(owed.values())).until <= now):
            owed.popitem(last=False)
        while orphans and (len(orphans) > MOST or next(iter(orphans.values())) <= now):
            orphans.popitem(last=False)

    def pay(self, now: float, most: int) -> list[Owed]:
        """The next releases to send, the oldest first; at most so many. They are owed no longer."""
        found: list[Owed] = []
        while self._owed and len(found) < most:
            owed = self._owed.popitem(last=False)[1]
            if owed.until > now:
                owed.rest = max(0.0, owed.rests_until - now)
                found.append(owed)
        return found
