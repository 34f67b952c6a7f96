"""What a server still has to forget: releases that did not reach it, and ids whose acquire may yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynclock._op import Op, Queueing, Serve

if TYPE_CHECKING:
    from collections.abc import Iterator

_GRACE = 60.0
"""So many seconds after its lease has an undelivered op no more to say."""

_SERVING = {serve: Queueing(serve, contended=True) for serve in Serve}  # of what is owed: it puts no ticket back


class Debts:
    """One node's."""

    def __init__(self) -> None:
        self._owed: dict[str, tuple[Op, float]] = {}
        self.orphans: dict[str, float] = {}  # ids that are to be released with a tombstone
        self._until: dict[str, float] = {}  # of all that was owed: who is refused again and again is not for ever

    def __len__(self) -> int:
        """How many releases are owed."""
        return len(self._owed)

    def owe(self, op: Op, now: float) -> None:
        """Keep a release that could not be delivered; at the longest while the hold it undoes may live."""
        while self._owed and next(iter(self._owed.values()))[1] <= now:
            del self._owed[next(iter(self._owed))]
        until = self._until.setdefault(op.id, now + op.lease + _GRACE)
        if op.id not in self._owed and until > now:
            owed = Op(
                op.verb, op.kind, op.name, op.id, op.lease, op.fence, op.memory, op.rest, tombstone=True, done=op.done
            )
            owed.queueing = _SERVING[op.queueing.serve]
            self._owed[op.id] = owed, until

    def orphan(self, op: Op, now: float) -> None:
        """An acquire, or a ticket, was left unanswered on a connection that is gone."""
        self.orphans[op.id] = now + op.lease + _GRACE

    def pay(self, now: float) -> Iterator[Op]:
        """What is to be sent now, once, on a new connection."""
        self.orphans = {orphan: until for orphan, until in self.orphans.items() if until > now}
        self._until = {known: until for known, until in self._until.items() if until > now or known in self._owed}
        owed, self._owed = self._owed, {}
        return (op for op, until in owed.values() if until > now)
