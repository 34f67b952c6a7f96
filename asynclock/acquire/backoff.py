"""When a waiter asks next, unless it is called before. Pure, but for jitter: a fleet shall not march in step."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from asynclock._options import QUORUM_TIMEOUT

HEADS = 3
"""So many of the queue look when the holder's lease ends, since a dead holder calls nobody."""

RENEW = 1 / 3
"""A ticket is renewed after this share of its life ..."""
FRESH = 1 / 2
"""... and served up to this one."""

POLITE = 0.1
"""With fewer seconds left a waiter yields to no remote waiter: that can take half of them."""

COLLISIONS = 8
"""A `timeout=0` tries another slot at most so many times."""

_GLANCE = (0.05, 0.25)  # seconds between two looks at the hold of somebody who calls nobody
_CALLED = 0.01  # so many seconds at least has one who was called before the next tries
_PAUSE = (0.002, 0.25)  # the same where no notices come: the first pause, doubled up to the last
_OUTAGE_PAUSE = (0.02, 0.5)  # the same while a majority is out of reach
_SPLIT = (0.0005, 0.25)  # between two tries after split votes: at least, and at most


class Plan(NamedTuple):
    """When to ask next, unless a notice comes before; and what."""

    at: float
    probe: bool = False  # renew the ticket, and see; else try


def next_question(now: float, sent: float, lease: float, rank: int, left: float | None, notifies: bool) -> Plan:
    """When to ask next. The ticket was sent at `sent` and has that rank; the hold in the way ends in `left` seconds
    (math.inf: never; None: there is none); `notifies`: its holder's release serves the queue."""
    renewal = sent + lease * RENEW * random.uniform(0.8, 1.0)  # noqa: S311 - jitter
    if left is None:
        return Plan(renewal, probe=True)
    if rank < HEADS and not (notifies and left < math.inf):
        return Plan(min(renewal, now + random.uniform(*_GLANCE)))  # noqa: S311 - jitter
    end = now + left + max(0, rank - HEADS + 1) * 0.002
    return Plan(end) if end < renewal else Plan(renewal, probe=True)


def after_call(now: float, rtt: float) -> Plan:
    """When to try, somebody else having been called, who comes in, and calls us, before; unless he is stuck."""
    return Plan(now + max(2 * round_trip(rtt), _CALLED) * random.uniform(1.0, 2.0))  # noqa: S311 - jitter


def after_split(now: float, rtt: float, rank: int, splits: int) -> Plan:
    """When to try again, the votes having been split `splits` times in a row; the first in the queue goes first."""
    pause = min(round_trip(rtt) * (1 + min(rank, 8)) * 2 ** min(splits - 1, 8), _SPLIT[1])
    return Plan(now + pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter


def after_doubt(now: float, sent: float, lease: float, since: float, life: float, doubts: int) -> Plan:
    """When to look again, the nodes having named different holders, the last of them first at `since`: once an attempt,
    which lives for `life` seconds, would be gone. Where they have named new ones each time for `doubts` times, somebody
    is served all the time, and the pauses grow up to the renewal of the ticket, which was sent at `sent`."""
    renewal = sent + lease * RENEW * random.uniform(0.8, 1.0)  # noqa: S311 - jitter
    at = since + life * random.uniform(1.0, 1.2)  # noqa: S311 - jitter
    if doubts:
        at = max(at, now + life * 2 ** min(doubts - 1, 16))
    return Plan(min(at, renewal), probe=True)


def round_trip(rtt: float) -> float:
    """Seconds to wait for what should come within a round trip."""
    return min(max(rtt, _SPLIT[0]), QUORUM_TIMEOUT)


class Pace:
    """The same where nobody calls: pauses that grow."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._no_longer: float | None = None  # when an outage has lasted too long
        self.outage: Exception | None = None  # why no majority decided the last round
        self.reasons: dict[int, Exception] = {}  # what each node said last, in this outage
        self._pause = _PAUSE[0]
        self._outage_pause = _OUTAGE_PAUSE[0]

    def after_refusal(self, now: float, soonest: float = math.inf) -> Plan:
        """`soonest` is how many seconds from now a holder's lease may end."""
        pause = min(self._pause * random.uniform(0.5, 1.0), soonest)  # noqa: S311 - jitter
        self._pause = min(2 * self._pause, _PAUSE[1])
        return Plan(now + pause)

    def reached(self) -> None:
        """A majority answered: the next outage has patience of its own."""
        self._no_longer = self.outage = None
        self.reasons.clear()
        self._outage_pause = _OUTAGE_PAUSE[0]

    def after_outage(self, now: float, give_up: float) -> Plan | None:
        """When to try again; None: the time is over. The last try comes early enough for its answer: a try
        that is cut off at the end is silent, and hides the real reason. After it the waiter sleeps until the end."""
        limit = self.outage_limit(now, give_up)
        if now >= limit:
            return None
        pause = self._outage_pause * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
        self._outage_pause = min(2 * self._outage_pause, _OUTAGE_PAUSE[1])
        last = limit - QUORUM_TIMEOUT
        return Plan(min(now + pause, last) if now < last else limit)

    def outage_limit(self, now: float, give_up: float) -> float:
        """When an acquire gives up that meets an outage."""
        self._no_longer = self._no_longer or now + self._patience
        return min(self._no_longer, give_up)
