"""Flood: which lines of a log are printed where many of one kind come. The others are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from asynclock._clock import Clock, Timer

BURST = 10
"""So many lines of one kind are printed in one window; the others are counted."""

WINDOW = 10.0
"""Seconds of one window. It begins with its first line."""


class Flood:
    """Which lines of one kind are printed: the first of each window. `report(kind, count)` is called at the end of a
    window in which others came."""

    def __init__(self, clock: Clock, report: Callable[[Any, int], object]) -> None:
        self._clock = clock
        self._report = report
        self._windows: dict[Hashable, _Window] = {}

    def admits(self, kind: Hashable) -> bool:
        """Count a line of that kind. True: print it."""
        now = self._clock.now()
        window = self._windows.get(kind)
        if window is None or now >= window.ends:
            self._end(kind)
            window = self._windows[kind] = _Window(now + WINDOW)
        window.lines += 1
        if window.lines <= BURST:
            return True
        if window.timer is None:
            window.timer = self._clock.call_at(window.ends, lambda: self._end(kind))
        return False

    def stop(self) -> None:
        """Report now what was counted."""
        for kind in tuple(self._windows):
            self._end(kind)

    def _end(self, kind: Hashable) -> None:
        window = self._windows.pop(kind, None)
        if window is not None and window.timer is not None:
            window.timer.cancel()
            self._report(kind, window.lines - BURST)


class _Window:
    """The lines of one kind in one window."""

    __slots__ = ("ends", "lines", "timer")

    def __init__(self, ends: float) -> None:
        self.ends = ends
        self.lines = 0
        self.timer: Timer | None = None  # set while lines are counted that were not printed
