"""How long a node that closes waits. Pure."""

from __future__ import annotations

from asynclock.rules.model import ADOPT, BREAK, RELEASE

AWAITED = (RELEASE, ADOPT, BREAK)
"""The ops whose answers a node awaits when it closes: they show whether a lock is free."""

_AT_LEAST = 0.1

AT_MOST = 1.8
"""Seconds for which a node that closes waits for answers. A second remains to disconnect."""

CANCELLING = 0.3
"""Seconds for which a close waits for a task that it has cancelled. Drivers, and providers of credentials, may lose a
cancel."""


def closing_time(left: float) -> float:
    """Seconds for which a node that closes waits; the last answer to an op of `AWAITED` is overdue in `left` seconds.
    For other answers it waits for a moment only."""
    return min(max(left, _AT_LEAST), AT_MOST)
