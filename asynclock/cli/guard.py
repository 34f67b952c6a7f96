"""When the command of `asynclock run` must end, because its lease ends soon; and what its exit code means. Pure.

The watchdog renews a lease when two thirds of it are left. The moments below are in lengths of the lease:

    1/3 left    several renewals have failed: SIGTERM to the process group
    1/10 left   SIGKILL, so that no process of the group runs when another owner may begin

If a lease is over at once (broken, taken, or expired while the machine slept), SIGKILL comes a tenth after SIGTERM.
"""

from __future__ import annotations

from enum import StrEnum

from asynclock.cli.program import Code

_TERM = 1 / 3
_KILL = 1 / 10


class OnLost(StrEnum):
    """What happens to the command when its lease cannot be kept."""

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
    """Seconds until the next look at the lease. The looks are frequent, because the timers of an event loop do not
    count the time for which a machine sleeps."""
    return lease / 12 if due is None else min(due, lease / 12)


def exit_code(returncode: int) -> int:
    """As shells say it: the code of the command, or 128 + n for signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def cannot_run(error: OSError) -> Code:
    """As shells say it: there is no such command, or it cannot be executed."""
    return Code.NOT_FOUND if isinstance(error, FileNotFoundError) else Code.CANNOT_EXECUTE
