"""Quarantine: which servers cast no vote for a time, because they may have forgotten holds. This is the delayed
restart of the Redlock page (https://redis.io/docs/latest/develop/use/patterns/distributed-locks/).

The rules:

1. If this client finds a server in place of another one, the new server casts no vote for the length of the quarantine.
   Its age does not matter: it may be a replica that was promoted before it had all holds.
2. A server that started less than this length ago casts no vote until this length has passed since its start. By then
   each hold that it may have forgotten has ended.
3. A server with its own mark votes: since its start, a client has found the deployment new, or the quarantine over.
   That client has set the mark, a key without expiry. Its value is the run_id of the server.
4. A deployment is new if each server that answers started less than this length ago, has no mark, and is the first
   server that this client found in its place. Then all its servers vote at once, because they have nothing to forget.
   This is decided after every server that can answer has answered, because a late one may have a mark. A server that
   this client has met and that does not answer now may have got a mark. Then the deployment does not count as new.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock._time import Clock
    from asynclock.stores.port import Facts

VOTES = -math.inf
"""The end of a quarantine for a server that may vote."""


class Ruling(NamedTuple):
    """The conclusion from the facts."""

    until: tuple[float, ...]  # when the quarantine of each node ends, on the client's clock; VOTES: there is none
    new: bool  # by these facts the deployment is new; it counts only if they are complete
    doubtful: bool  # another client may be setting the marks of a new deployment right now: read them again


NO_QUARANTINE = Ruling((), new=False, doubtful=False)
"""For a single node, and for nodes that forget nothing."""


def judge(facts: Sequence[Facts | None], now: float, length: float, *, complete: bool) -> Ruling:
    """Which nodes cast no vote, and until when. `facts` has an entry for each node, None if a node has given no facts;
    `complete`: every node that can answer has answered. Pure."""
    known = [each for each in facts if each is not None]
    recent = [now < each.started + length for each in known]
    new = bool(known) and all(recent) and all(each.mark == "" and each.replaced is None for each in known)
    unmarked = sum(is_recent and not each.is_marked for is_recent, each in zip(recent, known, strict=True))
    if complete and new:
        return Ruling((VOTES,) * len(facts), new=True, doubtful=False)
    until = tuple(VOTES if each is None else _until(each, now, length) for each in facts)
    return Ruling(until, new, doubtful=0 < unmarked < len(facts))


def _until(facts: Facts, now: float, length: float) -> float:
    """When the quarantine of one server ends (rules 1 to 3)."""
    if facts.replaced is not None:
        until = facts.replaced + length
    elif facts.is_marked:
        until = VOTES
    else:
        until = facts.started + length
    return until if now < until else VOTES


class Quarantine:
    """The rules with the length and the clock of one client."""

    def __init__(self, length: float, clock: Clock) -> None:
        self._length = length
        self._now = clock.now

    def until(self, facts: Facts) -> float:
        """When the quarantine of one node ends. Decided when the node connects, from the facts of its server alone."""
        return judge([facts], self._now(), self._length, complete=False).until[0]

    def judge(self, facts: Sequence[Facts | None]) -> Ruling:
        """The ruling over all nodes, after each node that can answer has answered."""
        return judge(facts, self._now(), self._length, complete=True)
