"""The holders that block a waiter over N nodes, for a kind that several may hold.

Each node names one of the holders, and not all nodes name the same: the first or last hold at one node need not be so
at another. The nodes also name different ids while the votes are split between attempts. The waiter has to wait for
holds: their releases notify it. It must not wait for attempts: the undo of a minority notifies nobody, and the waiter
would sleep until it renews its ticket, although the name is free.

Time separates the two. An attempt is decided, and undone, within two node timeouts, and its id never comes again. So an
id that was named for longer than that is the id of a hold. The node timeout of a client that is far from the nodes is
longer than that of one that is near: the longest that any client of the name may have counts. Until then the waiter
probes, at first after two node timeouts of its own, then with pauses that grow.

Over N nodes a permit of a semaphore is a slot, and a hold may be missing at a minority of the nodes. A node that grants
a slot does not say which others are taken there. So one refusal does not show that no slot is free on a majority; the
replies to the last few attempts together show it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynclock.acquire.backoff import Plan, after_doubt, after_split, next_question
from asynclock.quorum.denials import first_free
from asynclock.rules.model import ID_LENGTH, TIMED, WAIT

if TYPE_CHECKING:
    from collections.abc import Collection

    from asynclock.quorum.ballot import Ballot
    from asynclock.rules.model import Slots
    from asynclock.stores.port import Refused

_SPLIT_TRIES = 3
"""This many tries follow votes that may be split. After them the waiter waits, to find out whether they are."""

_SLOTS_LIVES = 2
"""The reply of a node about its slots is used for this many lives of an attempt. After that, other slots may be
free."""

_REMEMBERED = 64
"""A waiter remembers at most this many ids, or one for each node if that is more."""


def notifies(holder: str) -> bool:
    """Whether the waiter can rely on the end of this hold: its release serves the queue, or it is no client's hold but
    a name that rests (min_hold, once) until a known time."""
    return holder[ID_LENGTH : ID_LENGTH + 1] == "|" or holder in TIMED


class Obstacles:
    """The ids that the nodes have named to one waiter."""

    __slots__ = ("_doubts", "_life", "_longest", "_since", "_taken")

    def __init__(self, life: float, longest: float = 0.0) -> None:
        self._life = life  # seconds for which the nodes may name an attempt of this client, at most
        self._longest = max(life, longest)  # and one of any client
        self._since: dict[str, float] = {}  # id -> when it was named first
        self._taken: dict[int, tuple[float, Slots]] = {}  # node -> when it was asked, and which slots are taken there
        self._doubts = 0  # refusals in a row that may have been split votes

    def plan(self, ballot: Ballot, now: float, rtt: float, rank: int) -> Plan:
        """When to ask next, after a refusal by a majority that all name a holder."""
        denials, lease = ballot.denials(), ballot.op.lease
        since = self.since(denials, ballot.nodes, now)
        one = ballot.holder()
        if one is not None or since + self._longest <= ballot.sent:
            self._doubts = 0
            if one is not None:
                return next_question(now, ballot.sent, lease, rank, one.left, notifies(one.holder))
            all_notify = all(notifies(refused.holder) for refused in denials if refused.left is not None)
            return next_question(now, ballot.sent, lease, rank, first_free(denials, ballot.nodes), all_notify)
        if ballot.op.verb is WAIT and not self._doubts:  # it was held before, and no notice has come since
            self._doubts = _SPLIT_TRIES
        self._doubts += 1
        if self._doubts <= _SPLIT_TRIES:
            return after_split(now, rtt, rank, self._doubts)
        known = ballot.sent - since  # if that is longer than an attempt of this client takes, it may be another's
        life = self._life if known < self._life else min(4 * known, self._longest)
        return after_doubt(now, ballot.sent, lease, since, life, self._doubts - _SPLIT_TRIES - 1)

    def since(self, denials: Collection[Refused], nodes: int, now: float) -> float:
        """When the newest id was first named, of the ids that block a majority of the nodes. Each node names one id."""
        ids = [refused.holder for refused in denials if refused.left is not None]
        since = {holder: self._since.pop(holder, now) for holder in dict.fromkeys(ids)}
        self._since.update(since)  # in the order in which they were named last
        while len(self._since) > max(_REMEMBERED, nodes):
            del self._since[next(iter(self._since))]
        return sorted(since[holder] for holder in ids)[nodes // 2]

    def taken(self, ballot: Ballot) -> list[Slots]:
        """The slots in use at each node, of a kind that has slots, by its recent replies."""
        sent = ballot.sent
        self._taken.update((index, (sent, slots)) for index, slots in ballot.taken().items())
        return [slots for when, slots in self._taken.values() if when > sent - _SLOTS_LIVES * self._life]
