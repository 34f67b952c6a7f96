"""When a hold is renewed, and when it is over. Pure, but for jitter."""

from __future__ import annotations

import random
from enum import Enum

RENEW_BELOW = 2 / 3
"""A hold is renewed once less than this share of its lease remains."""

RETRY = 1 / 12
"""After this share of the lease a renewal without an answer is tried again."""


class Due(Enum):
    """What is due for a hold."""

    NOTHING = "nothing"
    RENEWAL = "renewal"
    EXPIRED = "expired"
    MAX_HOLD = "max_hold"


def due(now: float, ends: float, renew_at: float, hold_until: float) -> Due:
    """What is due now. The ends come first, because nothing renews a hold that is over. Pure."""
    if now >= hold_until:
        return Due.MAX_HOLD
    if now >= ends:
        return Due.EXPIRED
    if now >= renew_at:
        return Due.RENEWAL
    return Due.NOTHING


def retry_after(lease: float) -> float:
    """Seconds until an unanswered renewal is tried again: lease/12, with jitter, so that the clients of a fleet do not
    all retry at the same moment."""
    return lease * RETRY * random.uniform(0.8, 1.0)  # noqa: S311 - jitter
