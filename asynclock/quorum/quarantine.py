"""Quarantine: which servers cast no vote for a while, because they may have forgotten holds. This is the delayed
restart of the Redlock page (https://redis.io/docs/latest/develop/use/patterns/distributed-locks/).

The rules:

1. A server that replaces another one, as this client has seen, casts no vote for the length of the quarantine from that
   moment. Its age does not matter: it may be a replica that lagged behind the server before it.
2. A server that started less than that length ago casts no vote until it is as old as that. Each hold that it may have
   forgotten has ended by then.
3. A server that bears its own mark votes: another client found the deployment new since that server started. The mark
   is a key without expiry which the first use leaves on each server; it contains the run_id of the server.
4. A deployment is new, and all its servers vote at once, if each server that answers is young, bears no mark at all,
   and is the first one that this client met there. A new server has nothing to forget. This is decided only once every
   server that can answer has answered, because the one that is late may bear a mark.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock._clock import Clock
    from asynclock.stores.port import Facts

VOTES = -math.inf
"""The end of no quarantine."""


class Ruling(NamedTuple):
    """What follows from the facts."""

    until: tuple[float, ...]  # when the quarantine of each node ends, on the client's clock; VOTES: there is none
    new: bool  # the deployment is new
    doubtful: bool  # another client may be finding the deployment new right now: read the marks again


NO_QUARANTINE = Ruling((), new=False, doubtful=False)
"""Of a node alone, and of nodes that forget nothing."""


def judge(facts: Sequence[Facts | None], now: float, length: float, *, complete: bool) -> Ruling:
    """Which nodes cast no vote, and until when. `facts` are those of all nodes, None where a node told none; `complete`
    means that every node that can answer has done so. Pure."""
    known = [each for each in facts if each is not None]
    young = [now < each.started + length for each in known]
    new = bool(known) and all(young) and all(each.mark == "" and each.replaced is None for each in known)
    unmarked = sum(is_young and each.mark != each.run_id for is_young, each in zip(young, known, strict=True))
    if complete and new:
        return Ruling((VOTES,) * len(facts), new=True, doubtful=False)
    until = tuple(VOTES if each is None else _until(each, now, length) for each in facts)
    return Ruling(until, new, doubtful=0 < unmarked < len(facts))


def _until(facts: Facts, now: float, length: float) -> float:
    """Rules 1 to 3."""
    if facts.replaced is not None:
        until = facts.replaced + length
    elif facts.mark == facts.run_id:
        until = VOTES
    else:
        until = facts.started + length
    return until if now < until else VOTES


class Quarantine:
    """The same for one client: for how long, and on which clock."""

    def __init__(self, length: float, clock: Clock) -> None:
        self._length = length
        self._now = clock.now

    def until(self, facts: Facts) -> float:
        """Of one node that connects."""
        return judge([facts], self._now(), self._length, complete=False).until[0]

    def judge(self, facts: Sequence[Facts | None]) -> Ruling:
        """Of all nodes, once each that can answer has done so."""
        return judge(facts, self._now(), self._length, complete=True)
