"""When nothing goes wrong: the times of a run that no fault of its plan can have changed."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.clients import Client
    from simulation.plan import Fault, Plan

_WITHIN, _TRIPS = 0.3, 40
"""So many seconds, and so many times the mean delay of a message, are enough for what the clients do without a fault:
several attempts, if votes split."""

SINCE = 0.5
"""A waiter counts that has waited for so many seconds: then its ticket is at the servers."""


class Calm:
    """A fault has an effect for longer than it lasts: a ticket of a client that is gone, or a hold that a server could
    not be told to release, delays the waiters until it expires."""

    def __init__(self, plan: Plan) -> None:
        self.within = _WITHIN + _TRIPS * plan.delay  # seconds for what clients do without a fault
        self._begins: list[float] = []
        self._ends: list[float] = []  # the latest end of the troubles that have begun by then
        for fault in plan.faults:  # in their order
            self._begins.append(fault.at - self.within)
            end = fault.at + fault.seconds + _after(fault, plan)
            self._ends.append(max(end, self._ends[-1] if self._ends else -math.inf))

    def since(self, now: float) -> float:
        """Since when nothing has gone wrong; math.inf: something does, or its effects last."""
        index = bisect_right(self._begins, now)
        ended = self._ends[index - 1] if index else -math.inf
        return ended if ended <= now else math.inf

    def lasts(self, began: float, now: float) -> bool:
        """Whether nothing went wrong from `began` until now."""
        return self.since(now) <= began


def _after(fault: Fault, plan: Plan) -> float:
    """Seconds after its end for which a fault may hold up waiters."""
    if fault.what in ("slow", "errors", "noscript", "wall", "break"):
        return 2.0
    if fault.what in ("cut", "partition", "isolate", "alone", "kill", "close", "stop", "freeze"):
        return 1.2 * plan.longest_lease + 3.0  # until the tickets and the holds of that time have ended
    return plan.settings.max_lease + 1.2 * plan.longest_lease + 5.0  # a server that restarts casts no vote at first


def has_no_majority(client: Client, for_the_last: float = SINCE) -> bool:
    """An idle client learns of restarts with its next op, and waits for max_lease from then. A node that votes again
    gets a waiter's ticket with its next round."""
    since = client.clock.now() - for_the_last
    return 2 * len([node for node in client.nodes if node.votes_since > since]) >= len(client.nodes)
