"""The log lines of this package: which are printed where many of one kind come (the others are counted), and that none
of them has a character which could move a cursor or begin a line."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from asynclock._untrusted import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from asynclock._time import Clock, Timer

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


class _Escape(logging.Filter):
    """Log lines name nodes, locks and what servers say."""

    def filter(self, record: logging.LogRecord) -> bool:
        with contextlib.suppress(Exception):  # of a line that cannot be formatted: the handler reports it
            text = record.getMessage()
            if not text.isprintable():
                record.msg, record.args = printable(text), None
        return True


for _name in ("asynclock", "asynclock.kazoo"):  # a logger does not filter the lines of those below it
    logging.getLogger(_name).addFilter(_Escape())
