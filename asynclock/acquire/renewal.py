"""When a hold is renewed, and when it is over. Pure except for jitter."""

from __future__ import annotations

import random
from enum import Enum

RENEW_BELOW = 2 / 3
"""A hold is renewed once less than this share of its lease remains."""

RETRY = 1 / 12
"""A renewal without a reply is sent again after this share of the lease."""


class Due(Enum):
    """The action that is due for a hold."""

    NOTHING = "nothing"
    RENEWAL = "renewal"
    EXPIRED = "expired"
    MAX_HOLD = "max_hold"


def due(now: float, ends: float, renew_at: float, hold_until: float) -> Due:
    """The action that is due now. The ends are checked first, because a hold that is over is not renewed. Pure."""
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
