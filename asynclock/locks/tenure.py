"""What becomes of a lease, and the errors and warnings that say so."""

from __future__ import annotations

import logging
import warnings
from enum import Enum

from asynclock._errors import LockLost, LockNotHeld, Reason, brief

log = logging.getLogger("asynclock")


class Tenure(Enum):
    """What became of a lease."""

    HELD = "held"
    UNKNOWN = "unknown"  # held, but the last renewal had no answer
    LOST = "lost"
    RELEASED = "released"
    DETACHED = "detached"  # given away


HELD, UNKNOWN, LOST, RELEASED, DETACHED = Tenure  # quicker to read than from the class, as those of `model.py`
OPEN = (HELD, UNKNOWN)
GIVEN = (RELEASED, DETACHED)


def ended(name: str, tenure: Tenure, reason: Reason) -> LockLost | LockNotHeld:
    """The error for the use of a lease that has ended so."""
    if tenure in GIVEN:
        how = "detached" if tenure is DETACHED else "given back already"
        return LockNotHeld(f"{brief(name)} was {how}", name=name)
    return LockLost(name, reason)


def warn_dropped(name: str, remaining: float, lease: object) -> None:
    """The program has no reference to a lease that is held."""
    warnings.warn(
        f"the lease of {brief(name)} was dropped while held: release it, or use `async with`; "
        f"it ends by itself in {remaining:.3g} s",
        ResourceWarning,
        source=lease,
        stacklevel=3,
    )


def log_unattended(name: str) -> None:
    """The task of a lease has ended without a release. Its Lock keeps the lease, so that nothing else reports it. Other
    tasks may use it on purpose, so this is no warning."""
    log.info(
        "asynclock: the task that acquired %s has ended; its lease is renewed until it is released (max_hold ends it)",
        brief(name),
    )
