"""When the command of `asynclock run` must end, for its lease is about to; and what its exit code means. Pure.

The watchdog renews a lease when two thirds of it are left. The moments below are in lengths of the lease:

    1/3 left    several renewals have failed: SIGTERM to the process group
    1/10 left   SIGKILL, so that nothing runs any more when another owner may begin

A lease that is over at once (broken, taken, or found so after a sleep of the machine) leaves a tenth after SIGTERM.
"""

from __future__ import annotations

from enum import StrEnum

from asynclock.cli.program import Code

_TERM = 1 / 3
_KILL = 1 / 10


class OnLost(StrEnum):
    """What becomes of the command when its lease cannot be kept."""

    TERM = "term"
    """SIGTERM, then SIGKILL."""
    KILL = "kill"
    """SIGKILL."""
    IGNORE = "ignore"
    """It runs on."""


def due_in(policy: OnLost, lease: float, remaining: float) -> float | None:
    """Seconds until the command must be told to end; 0.0: now; None: never."""
    if policy is OnLost.IGNORE:
        return None
    return max(0.0, remaining - lease * (_TERM if policy is OnLost.TERM else _KILL))


def grace(policy: OnLost, lease: float, remaining: float) -> float:
    """Seconds from SIGTERM to SIGKILL."""
    if policy is OnLost.KILL:
        return 0.0
    if remaining <= 0.0:
        return lease * _KILL
    return max(remaining - lease * _KILL, remaining / 2)


def look_again(lease: float, due: float | None) -> float:
    """Seconds until the next look at the lease. A timer of the loop does not count the sleep of a machine, so that the
    looks are not far apart."""
    return lease / 12 if due is None else min(due, lease / 12)


def exit_code(returncode: int) -> int:
    """As shells say it: the code of the command, or 128 + n for signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def cannot_run(error: OSError) -> Code:
    """As shells say it: there is no such command, or it cannot be executed."""
    return Code.NOT_FOUND if isinstance(error, FileNotFoundError) else Code.CANNOT_EXECUTE
