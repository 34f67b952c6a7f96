"""Time that a test moves."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class FakeTimer:
    """A scheduled call."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class FakeClock:
    """A Clock that stands still but for `advance`. Its timers fire `early` seconds too soon, as an event loop's may by
    its clock's resolution."""

    def __init__(self, now: float = 1_000.0, early: float = 0.0) -> None:
        self._now = now
        self._early = early
        self._jumped = 0.0
        self._numbers = count()
        self._timers: list[tuple[float, int, FakeTimer]] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return 1_700_000_000.0 + self._jumped + self._now

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back; `now` does not change."""
        self._jumped += seconds

    def call_at(self, when: float, callback: Callable[[], object]) -> FakeTimer:
        timer = FakeTimer(callback)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    @property
    def armed(self) -> int:
        """How many timers are scheduled."""
        return sum(timer.callback is not None for _, _, timer in self._timers)

    def advance(self, seconds: float) -> None:
        """Let time pass; each timer is called at its moment, in order. Their exceptions are raised here."""
        end = self._now + seconds
        while self._timers and self._timers[0][0] - self._early <= end:
            when, _, timer = heapq.heappop(self._timers)
            if timer.callback is None:
                continue
            self._now = max(self._now, when - self._early)
            if self._early:  # the next loop turn is not at the same moment
                self._now += self._early / 4
            timer.callback()
        self._now = max(self._now, end)

    def block(self, seconds: float) -> None:
        """Let time pass while nothing can run, as under a blocked event loop: the next advance calls the timers."""
        self._now += seconds
