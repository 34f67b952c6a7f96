"""LoopLag: how late the event loop is. A loop is late while a call blocks it, and while its process gets no CPU time.

While a hold exists, the watchdog's one timer fires at least every BEAT of the shortest lease that the session has used.
If it fires late, the loop ran nothing in the meantime. Without holds there is no timer.

Only the event loop changes this object. Another thread may read `expected`, which is one float: `renewal_thread.py`
learns from it that the loop is late.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

BEAT = 1 / 12
"""The longest pause between two beats, as a share of the shortest lease."""

REPORT_ABOVE = 1 / 3
"""A lag of more than this share of the shortest lease is reported. Renewals are due by then."""


class Block(NamedTuple):
    """A time in which the event loop ran nothing."""

    seconds: float  # at least so many; at most BEAT of a lease more
    ended: float  # on the client's clock


class LoopLag:
    """See the module. Times are seconds of the client's clock. `report` is called with the seconds of a long lag."""

    __slots__ = ("_last", "_report", "expected", "lease", "period")

    def __init__(self, report: Callable[[float], object] = lambda seconds: None) -> None:
        self._report = report
        self.period = math.inf  # seconds between two beats
        self.expected = math.inf  # when the next beat is due; math.inf: none is due
        self.lease = math.inf  # the shortest lease that the session has used
        self._last: Block | None = None

    def use(self, lease: float) -> None:
        """The session uses a lease of so many seconds."""
        self.lease = min(lease, self.lease)
        self.period = self.lease * BEAT

    def expect(self, at: float) -> None:
        """The next beat is due then."""
        self.expected = at

    def rest(self) -> None:
        """No beat is due any more."""
        self.expected = math.inf

    def beat(self, now: float) -> None:
        """The loop runs."""
        late = now - self.expected
        self.expected = now + self.period
        if late > self.period:
            self._last = Block(late, now)
            if late > self.lease * REPORT_ABOVE:
                self._report(late)

    def late(self, now: float, due: float, since: float) -> float:
        """The seconds for which the loop was late: for a check that was due at `due`, or in a block after `since`."""
        block = self.last_block(now)
        blocked = block.seconds if block is not None and block.ended > since else 0.0
        return max(blocked, now - due if due > -math.inf else 0.0)

    def last_block(self, now: float) -> Block | None:
        """The last time in which the loop ran nothing for longer than a beat; None: there was none. It may be going on:
        a task that blocked the loop calls this before any timer has fired."""
        late = now - self.expected
        return Block(late, now) if late > self.period else self._last
