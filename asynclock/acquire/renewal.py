"""When a hold is renewed, and when it is over. Pure except for jitter."""

from __future__ import annotations

import random
from enum import Enum

from asynclock.quorum.ballot import drift

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


def thread_extends_by(now: float, ends: float, lease: float, limit: float) -> float:
    """The seconds for which the renewal thread extends a hold now, so that it ends by `limit`; 0.0: it is not due, it
    is over, or it may not be held for longer. Pure."""
    if now >= ends or ends - now >= lease * RENEW_BELOW:
        return 0.0
    length = min(lease, limit - now)
    return length if now + length - drift(length) > ends else 0.0


def retry_after(lease: float) -> float:
    """Seconds until an unanswered renewal is tried again: lease/12, with jitter, so that the clients of a fleet do not
    all retry at the same moment."""
    return lease * RETRY * random.uniform(0.8, 1.0)  # noqa: S311 - jitter
