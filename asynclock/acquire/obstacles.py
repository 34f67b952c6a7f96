"""What a waiter for a kind that several may hold over N nodes makes of the holders that the nodes name.

Where several hold a name, each node names one of them, and not all the same: what is the first or the last at one node
need not be so at another. The nodes also name different ids where attempts under way have split the votes. The first
have to be waited for, and their releases call the next waiter. The second must not be waited for, since the undo of a
minority calls nobody: a waiter would sleep until its ticket is renewed, though nobody holds the name.

What tells them apart is time. An attempt is decided, and undone, within two node timeouts, and its id never comes
again. So an id that was named for longer than that is the id of a hold.

Over N nodes a permit of a semaphore is a slot, and a hold may be missing at a minority of the nodes. A node that gives
a slot does not say which others are taken there, so one refusal does not show that none is free on a majority. What the
nodes said to the last few attempts does.
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

_GLANCES = 3
"""So many tries follow votes that may be split, before the waiter waits to find out whether they are."""

_MOMENTS = 2
"""What a node said of its slots counts for so many lives of an attempt: later attempts are for other slots."""

_REMEMBERED = 64
"""So many ids a waiter remembers, or one of each node, if these are more."""


def notifies(holder: str) -> bool:
    """Whether a holder is notified of waiters, and serves them; a name that rests (min_hold, once) ends on time."""
    return holder[ID_LENGTH : ID_LENGTH + 1] == "|" or holder in TIMED


class Obstacles:
    """The ids that the nodes have named to one waiter."""

    __slots__ = ("_doubts", "_life", "_since", "_taken")

    def __init__(self, life: float) -> None:
        self._life = life  # so many seconds at most an attempt may be seen
        self._since: dict[str, float] = {}  # id -> when it was named first
        self._taken: dict[int, tuple[float, Slots]] = {}  # node -> when it was asked, and which slots are taken there
        self._doubts = 0  # refusals in a row that may have been split votes

    def look(self, ballot: Ballot, now: float, rtt: float, rank: int) -> Plan:
        """When to ask next, after a refusal by a majority that all name a holder."""
        denials, lease = ballot.denials(), ballot.op.lease
        since = self.since(denials, ballot.nodes, now)
        one = ballot.holder()
        if one is not None or since + self._life <= ballot.sent:
            self._doubts = 0
            if one is not None:
                return next_question(now, ballot.sent, lease, rank, one.left, notifies(one.holder))
            all_notify = all(notifies(refused.holder) for refused in denials if refused.left is not None)
            return next_question(now, ballot.sent, lease, rank, first_free(denials, ballot.nodes), all_notify)
        if ballot.op.verb is WAIT and not self._doubts:  # it was held before, and nobody has called since
            self._doubts = _GLANCES
        self._doubts += 1
        if self._doubts <= _GLANCES:
            return after_split(now, rtt, rank, self._doubts)
        return after_doubt(now, ballot.sent, lease, since, self._life, self._doubts - _GLANCES - 1)

    def since(self, denials: Collection[Refused], nodes: int, now: float) -> float:
        """Since when the ids are known that are in the way at a majority of the nodes, which names one each."""
        ids = [refused.holder for refused in denials if refused.left is not None]
        since = {whose: self._since.pop(whose, now) for whose in dict.fromkeys(ids)}
        self._since.update(since)  # those that were named last stand last
        while len(self._since) > max(_REMEMBERED, nodes):
            del self._since[next(iter(self._since))]
        return sorted(since[whose] for whose in ids)[nodes // 2]

    def taken(self, ballot: Ballot) -> list[Slots]:
        """The slots in use at each node, of a kind that has slots, as the nodes have said in the last moments."""
        sent = ballot.sent
        self._taken.update((index, (sent, slots)) for index, slots in ballot.taken().items())
        return [slots for when, slots in self._taken.values() if when > sent - _MOMENTS * self._life]
