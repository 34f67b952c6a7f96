"""Time, in seconds everywhere.

Validity is counted on CLOCK_BOOTTIME where the system has it. That clock does not jump with the wall clock, and it goes
on while the machine sleeps, as a lease on the server does. The wall clock only starts fencing tokens and order keys.
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
else:  # macOS: its monotonic clock may stand still while the machine sleeps (docs/safety.md)
    now = time.monotonic


class Timer(Protocol):
    """The result of `Clock.call_at`."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """A source of time: the machine's clock, or a clock that a test moves."""

    def now(self) -> float:
        """Seconds, on a clock that never goes back."""

    def wall(self) -> float:
        """Unix time in seconds."""

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call `callback` on the running loop once `now()` has reached `when`, in seconds."""


class SystemClock:
    """The machine's own clock."""

    now = staticmethod(now)
    wall = staticmethod(time.time)

    @staticmethod
    def call_at(when: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0.0, when - now()), callback)


SYSTEM = SystemClock()


def wake(sleeper: asyncio.Future[None]) -> None:
    """Wake a task that waits for `sleeper`, unless it is done."""
    if not sleeper.done():
        sleeper.set_result(None)
