"""Time, in seconds everywhere.

Validity is counted on CLOCK_BOOTTIME where there is one: it neither jumps with the wall clock nor stands still while
the machine sleeps (a lease on the server does not stand still either). The wall clock only seeds fencing tokens.
"""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

if hasattr(time, "CLOCK_BOOTTIME"):
    now: Callable[[], float] = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)
else:  # macOS: its monotonic clock goes on during sleep from 3.x on only in part; docs/safety.md says so
    now = time.monotonic


class Timer(Protocol):
    """What `Clock.call_at` answers."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """The seam for time: the machine's, or one that a test moves."""

    def now(self) -> float:
        """Seconds on a clock that only goes forward."""

    def wall(self) -> float:
        """Unix time in seconds."""

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call back on the running loop once `now()` has reached `when`."""


class SystemClock:
    """The machine's own clock."""

    now = staticmethod(now)
    wall = staticmethod(time.time)

    @staticmethod
    def call_at(when: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0.0, when - now()), callback)


SYSTEM = SystemClock()


def wake(sleeper: asyncio.Future[None]) -> None:
    """End a wait for a future, if it still waits."""
    if not sleeper.done():
        sleeper.set_result(None)
