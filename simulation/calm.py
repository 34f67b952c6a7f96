"""The times of a run in which nothing goes wrong; and when, and for which names, the assumptions of docs/safety.md
hold."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING

from asynclock._errors import QuorumUnavailable
from simulation.network import SLOWEST

if TYPE_CHECKING:
    from simulation.clients import Client
    from simulation.plan import Fault, Plan

_WITHIN, _TRIPS = 0.3, 40
"""So many seconds, and so many times the mean delay of a message, are enough for what the clients do without a fault:
several attempts, if votes split."""

SINCE = 0.5
"""A waiter counts that has waited for so many seconds: then its ticket is at the servers."""

_LOST_TOKENS = 20.0
"""Seconds before the loss of a counter in which a token may have been given that is above the next ones."""


class Calm:
    """When nothing goes wrong. Most faults have an effect for longer than they last: a hold that a server could not be
    told to release delays the waiters until it expires."""

    def __init__(self, plan: Plan) -> None:
        self.within = _WITHIN + _TRIPS * plan.delay  # seconds for what clients do without a fault
        self.slowest = 2 * SLOWEST * plan.delay  # seconds until an answer, at most
        self._begins: list[float] = []
        self._ends: list[float] = []  # the latest end of the troubles that have begun by then
        for fault in sorted(plan.faults, key=lambda each: each.at):
            self._begins.append(fault.at - self.within)
            end = fault.at + abs(fault.seconds) + _after(fault, plan)
            self._ends.append(max(end, self._ends[-1] if self._ends else -math.inf))

    def since(self, now: float) -> float:
        """Since when nothing has gone wrong; math.inf: something does, or its effects last."""
        index = bisect_right(self._begins, now)
        ended = self._ends[index - 1] if index else -math.inf
        return ended if ended <= now else math.inf

    def is_answered(self, error: BaseException, within: float) -> bool:
        """Whether the answers come in that time even where messages are slow, if this error says that they did not."""
        return not isinstance(error, QuorumUnavailable) or self.slowest <= within

    def lasts(self, began: float, now: float) -> bool:
        """Whether nothing went wrong from `began` until now."""
        return self.since(now) <= began


class Assumptions:
    """What docs/safety.md assumes holds for all names, until a fault of a plan that is not safe: a server loses data,
    its clock is stepped, or the key of a name is evicted. Then there may be two owners, as long as the effects of what
    was there last: a hold ends within max_lease. A mark (of a rest, or of `once`) may be set without the hold, by a
    release within a lease after that, and ends within max_lease of it. After a restart this counts from its end, and a
    token may be below those that were given in the 20 s before. All that is given later, all servers know."""

    def __init__(self, plan: Plan) -> None:
        self._doubts: list[tuple[float, float, frozenset[str] | None]] = []  # from, until, names (None: all)
        for fault in plan.faults if not plan.safe else ():
            if fault.what in ("evict", "step", "crash empty", "crash rewound"):
                until = fault.at + abs(fault.seconds) + _after(fault, plan) + _LOST_TOKENS
                names = frozenset(part.name for part in fault.lock.parts) if fault.lock is not None else None
                self._doubts.append((fault.at, until, names))

    def hold(self, name: str, now: float) -> bool:
        """Whether they hold for that name."""
        return not any(begin <= now < end and (names is None or name in names) for begin, end, names in self._doubts)

    def have_held(self, name: str, now: float) -> bool:
        """Whether they held for that name until now."""
        return not any(begin <= now and (names is None or name in names) for begin, _, names in self._doubts)


def _after(fault: Fault, plan: Plan) -> float:
    """Seconds after its end for which a fault may hold up waiters."""
    if fault.what in ("slow", "errors", "noscript", "wall", "break", "kill", "close"):
        return 2.0
    if fault.what in ("cut", "partition", "isolate", "alone", "stop", "freeze"):
        return 1.2 * plan.longest_lease + 3.0  # until the tickets and the holds of that time have ended
    return plan.settings.max_lease + 1.2 * plan.longest_lease + 5.0  # a server that restarts casts no vote at first


def has_no_majority(client: Client, for_the_last: float = SINCE) -> bool:
    """Whether no majority of the nodes has cast votes for this client all the time, for so many seconds until now. An
    idle client learns of restarts with its next op, and waits for max_lease from then. A node that votes again gets a
    waiter's ticket with its next round."""
    since = client.clock.now() - for_the_last
    return 2 * len([node for node in client.nodes if node.votes_since > since]) >= len(client.nodes)
