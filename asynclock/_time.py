"""What a clock is. Times are in seconds everywhere. `_clock.py` has the clock of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


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
