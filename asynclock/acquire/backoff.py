"""When a waiter asks next, unless a notice comes before. Pure except for jitter, which keeps clients out of step."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from asynclock._options import QUORUM_TIMEOUT

HEADS = 3
"""This many waiters at the head of the queue ask at the moment when the holder's lease ends, because a dead holder
notifies nobody. Each later one asks 2 ms after the one before."""

RENEW = 1 / 3
"""A waiter renews its ticket when this share of the lease has passed ..."""
FRESH = 1 / 2
"""... and a server serves the ticket until this share has passed."""

MIN_TO_YIELD = 0.1
"""A waiter with fewer seconds left than this does not yield to remote waiters: yielding can take half of this time."""

HEAD_POLLS = 0.05
"""Seconds between two polls of the first waiter in the queue, at most, if no notices come."""

COLLISIONS = 8
"""How many more slots an acquire with `timeout=0` tries, at most."""

# All in seconds. A pair is the least and the greatest value.
_FOREIGN_PAUSE = (0.05, 0.25)  # between two tries while a client of another library holds the name: it notifies nobody
_NOTIFIED = 0.01  # a notified waiter has at least this time before another one tries
_PAUSE = (0.002, 0.25)  # between two tries where no notices come; doubled after each
_OUTAGE_PAUSE = (0.02, 0.5)  # between two tries while a majority is out of reach; doubled after each
_CONFIRMED = 0.1  # an answer of the last so many seconds is new enough, however short the timeout is
_RECONNECTED = 0.05  # the clients of a server try again within this time after it is connected again
_WAKING_RATE = 5000  # tries per second of all tasks of a client at the end of an outage
_OUTAGE_RATE = 2000  # tries per second of all tasks of a client in an outage, about a fifth of a core
_SPLIT = (0.0005, 0.25)  # between two tries after split votes; doubled after each


class Plan(NamedTuple):
    """When to ask next, unless a notice comes before; and what."""

    at: float
    probe: bool = False  # only renew the ticket; else try


def next_question(now: float, sent: float, lease: float, rank: int, left: float | None, notifies: bool) -> Plan:
    """When to ask next. The ticket was sent at `sent` and has that rank. The hold that blocks it ends in `left` seconds
    (math.inf: never; None: no hold blocks it). `notifies`: the release of that hold serves the queue."""
    renewal = sent + lease * RENEW * random.uniform(0.8, 1.0)  # noqa: S311 - jitter
    if left is None:
        return Plan(renewal, probe=True)
    if rank < HEADS and not (notifies and left < math.inf):
        return Plan(min(renewal, now + random.uniform(*_FOREIGN_PAUSE)))  # noqa: S311 - jitter
    end = now + left + max(0, rank - HEADS + 1) * 0.002
    return Plan(end) if end < renewal else Plan(renewal, probe=True)


def after_notice_to_another(now: float, rtt: float) -> Plan:
    """When to try after a server has notified another waiter. Normally that waiter enters, and its release notifies
    this one. This try is for a waiter that does not come."""
    return Plan(now + max(2 * round_trip(rtt), _NOTIFIED) * random.uniform(1.0, 2.0))  # noqa: S311 - jitter


def after_split(now: float, rtt: float, rank: int, splits: int) -> Plan:
    """When to try again after votes were split `splits` times in a row. The first in the queue has the shortest
    pause."""
    pause = min(round_trip(rtt) * (1 + min(rank, 8)) * 2 ** min(splits - 1, 8), _SPLIT[1])
    return Plan(now + pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter


def after_doubt(now: float, sent: float, lease: float, since: float, life: float, doubts: int) -> Plan:
    """When to probe again after the nodes named different holders. The newest of them was first named at `since`. If it
    is an attempt, it ends within `life` seconds, and the probe comes after that. If the nodes named new holders
    `doubts` times in a row, other clients enter all the time. Then the pauses grow, up to the renewal of the ticket,
    which was sent at `sent`."""
    renewal = sent + lease * RENEW * random.uniform(0.8, 1.0)  # noqa: S311 - jitter
    at = since + life * random.uniform(1.0, 1.2)  # noqa: S311 - jitter
    if doubts:
        at = max(at, now + life * 2 ** min(doubts - 1, 16))
    return Plan(min(at, renewal), probe=True)


def confirm_from(give_up: float, timeout: float | None, within: float, rtt: float = 0.0) -> float:
    """From when on a majority must answer, so that the name is known to be held when the time of a waiter is up: an
    older answer says nothing about servers that failed since. A waiter without such an answer renews its ticket then.
    `within` is the node timeout; `rtt` is the time that the last round took: the answer needs as long."""
    return give_up - min(within, max((timeout or math.inf) / 3, 2 * rtt, _CONFIRMED))


def waking_time(crowd: int) -> float:
    """The seconds within which so many tasks try again after an outage: their tries take the loop half of that time."""
    return max(_RECONNECTED, crowd / _WAKING_RATE)


def round_trip(rtt: float) -> float:
    """Seconds to wait for a message that should come within one round trip."""
    return min(max(rtt, _SPLIT[0]), QUORUM_TIMEOUT)


class Pace:
    """The pauses of a waiter that gets no notices, and those in an outage. Both grow."""

    def __init__(self, patience: float, within: float = 0.0) -> None:
        self._patience = patience
        self._within = max(within, QUORUM_TIMEOUT)  # for the answer to the last try
        self._patience_ends: float | None = None  # when the patience for this outage ends
        self.outage: Exception | None = None  # why no majority decided the last round
        self.reasons: dict[int, Exception] = {}  # the last error of each node in this outage
        self._pause = _PAUSE[0]
        self._outage_pause = _OUTAGE_PAUSE[0]

    @property
    def ends(self) -> float:
        """When the patience for this outage ends; math.inf: there is no outage."""
        return math.inf if self._patience_ends is None else self._patience_ends

    def join(self, outage: Exception, patience_ends: float) -> None:
        """An outage that another task has met."""
        self.outage, self._patience_ends = outage, patience_ends

    def after_refusal(self, now: float, soonest: float = math.inf) -> Plan:
        """When to try again after a refusal: after a pause, or in `soonest` seconds if that is less, since a holder's
        lease may end then."""
        pause = min(self._pause * random.uniform(0.5, 1.0), soonest)  # noqa: S311 - jitter
        self._pause = min(2 * self._pause, _PAUSE[1])
        return Plan(now + pause)

    def reached(self) -> None:
        """A majority answered, so the outage is over. The next one gets the full patience again."""
        self._patience_ends = self.outage = None
        self.reasons.clear()
        self._outage_pause = _OUTAGE_PAUSE[0]

    def after_outage(self, now: float, give_up: float, crowd: int = 1, *, began: float | None = None) -> Plan | None:
        """When to try again; None: the time is over. The outage began at the latest when the round was sent that no
        majority answered (`began`; None: now). The more tasks of this client try (`crowd`), the longer each
        pauses, so that the loop has time for other work; they are woken when a majority is connected again. The last
        try leaves enough time for its reply, since a try without a reply would hide the real reason of the outage.
        After it the waiter sleeps until the end."""
        limit = self.outage_limit(now if began is None else began, give_up)
        if now >= limit:
            return None
        pause = max(self._outage_pause, crowd / _OUTAGE_RATE) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
        self._outage_pause = min(2 * self._outage_pause, _OUTAGE_PAUSE[1])
        last = limit - min(self._within, self._patience / 2)
        return Plan(min(now + pause, last) if now < last else limit)

    def outage_limit(self, began: float, give_up: float) -> float:
        """When an acquire gives up in an outage: when its patience or its timeout ends, whichever comes first."""
        self._patience_ends = self._patience_ends or began + self._patience
        return min(self._patience_ends, give_up)
