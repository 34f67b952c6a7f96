"""The releases that the masters of a cluster acknowledged a short while ago. After a failover the new master of a slot
may lack them, so it gets them again (`pending.py` has the reasons). A slot that moves to a master which this client
knew before takes its keys along. A release without an answer is not among them: it is sent to the new master itself,
and its answer counts there."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from asynclock.stores.redis.handlers import StandIn
from asynclock.stores.redis.pending import LATELY, MOST_SENT, release_again

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asynclock.rules.model import Op
    from asynclock.stores.port import Grant, Refused, ReplyHandler, Undone
    from asynclock.stores.redis.cluster.shard import Shard
    from asynclock.stores.undelivered import PendingRelease


class _Release(NamedTuple):
    """A release, the slot of its name, and the master that acknowledged it."""

    op: Op
    slot: int
    shard: Shard


class AcknowledgedReleases:
    """Those of one cluster."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._releases: deque[_Release] = deque(maxlen=MOST_SENT)

    def by(self, shard: Shard, slot: int, handler: ReplyHandler) -> ReplyHandler:
        """The handler with which the release is sent to that master."""
        if isinstance(handler, _Acknowledging):  # another master had redirected it
            handler = handler.handler
        return _Acknowledging(handler, self, shard, slot)

    def add(self, op: Op, slot: int, shard: Shard) -> None:
        """That master has answered the release."""
        op.sent = self._now()
        self._releases.append(_Release(op, slot, shard))
        shard.acknowledged(op)

    def hand_over(self, owners: Sequence[Shard | None], slot: int | None = None) -> None:
        """Slots have other masters (`slot`: only that one). Those that are new get the releases in their slots that
        another master acknowledged."""
        since = self._now() - LATELY
        some = [each for each in self._releases if (slot is None or each.slot == slot) and each.op.sent >= since]
        moved = {id(each): each for each in some if _is_new(owners[each.slot], each)}
        if not moved:
            return
        self._releases = deque((each for each in self._releases if id(each) not in moved), MOST_SENT)
        by_owner: dict[Shard, list[PendingRelease]] = {}
        for each in moved.values():
            if (owner := owners[each.slot]) is not None:
                self._releases.append(each._replace(shard=owner))
                by_owner.setdefault(owner, []).append(release_again(each.op))
        for owner, releases in by_owner.items():
            owner.deliver(releases)


def _is_new(owner: Shard | None, release: _Release) -> bool:
    return owner is not None and owner is not release.shard and owner.found_at >= release.op.sent


class _Acknowledging(StandIn):
    """Notes that a master has answered a release."""

    __slots__ = ("_known", "_shard", "_slot")

    def __init__(self, handler: ReplyHandler, known: AcknowledgedReleases, shard: Shard, slot: int) -> None:
        super().__init__(handler)
        self._known = known
        self._shard = shard
        self._slot = slot

    def answer(self, index: int, reply: Grant | Refused | Undone) -> None:
        self._known.add(self.op, self._slot, self._shard)
        super().answer(index, reply)
