"""Measures the round trips of one connection: one command at a time, so that the others cost nothing.

The time of a command that was sent with nothing before it, and whose answer is read as soon as it comes, is a sample of
the distance (`distance.py`), however late the answer is. While the loop is blocked, nothing is read. So a timer runs
beside such a command. If the timer is late at its first turn, or when the answer is read, there is no sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asynclock._clock import LATE
from asynclock.stores.distance import Distance
from asynclock.stores.redis.handlers import CommandReply, StandIn

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from asynclock._time import Clock, Timer
    from asynclock.stores.port import Grant, Refused, ReplyHandler, Undone

_LONGEST = 2.0  # seconds; a command without an answer for so long is no sample


class Stopwatch:
    """Keeps the last round trip of an op, in seconds, and the distance. `measured` gets each new limit of the distance;
    None: nobody needs it, and there are no samples."""

    def __init__(self, clock: Clock, measured: Callable[[float], object] | None = None) -> None:
        self.distance = Distance()
        self._clock = clock
        self._measured = measured
        self._last: float | None = None
        self._timer: Timer | None = None  # it runs beside a command that may become a sample
        self._due = self._began = 0.0  # when the timer is due, and when the command was sent

    def __call__(self) -> float | None:
        """The rtt of `port.Measured`."""
        return self._last

    def time_last(self, waiting: deque[ReplyHandler | CommandReply], handler: ReplyHandler) -> None:
        """Measure the op of this handler, if it was sent last and has no answer yet."""
        if waiting and waiting[-1] is handler:
            waiting[-1] = _Timed(handler, self, alone=len(waiting) == 1)

    def reply(self, waiting: deque[ReplyHandler | CommandReply], sent: float, deadline: float) -> CommandReply:
        """The handler for a command that is sent behind those that wait."""
        if waiting or self._measured is None:
            return CommandReply(sent, deadline)
        return _TimedReply(sent, deadline, self)

    def answered(self, sent: float) -> None:
        """The op that is measured was answered."""
        self._last = self._clock.now() - sent

    # -- samples -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A command is sent with nothing before it."""
        if self._measured is not None:
            self.stop()
            self._began = self._clock.now()
            self._run()

    def end(self) -> None:
        """It is answered."""
        if self._timer is None or self._measured is None:
            return
        self.stop()
        now, before = self._clock.now(), self.distance.limit
        if now - self._due <= LATE:
            self.distance.add(now - self._began)
            if self.distance.limit != before:
                self._measured(self.distance.limit)

    def stop(self) -> None:
        """It is no sample."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._due = self._clock.now() + LATE
        self._timer = self._clock.call_at(self._due, self._turn)

    def _turn(self) -> None:
        now, first = self._clock.now(), self._due - self._began < 2 * LATE
        if (first and now - self._due > LATE) or now - self._began > _LONGEST:
            self._timer = None
        else:
            self._run()


class _Timed(StandIn):
    """Measures when the server answers an op."""

    __slots__ = ("_alone", "_stopwatch")

    def __init__(self, handler: ReplyHandler, stopwatch: Stopwatch, *, alone: bool) -> None:
        super().__init__(handler)
        self._stopwatch = stopwatch
        self._alone = alone
        if alone:
            stopwatch.begin()

    def answer(self, index: int, reply: Grant | Refused | Undone) -> None:
        self._stopwatch.answered(self.sent)
        if self._alone:
            self._stopwatch.end()
        super().answer(index, reply)


class _TimedReply(CommandReply):
    """The reply to a command that was sent with nothing before it."""

    def __init__(self, sent: float, deadline: float, stopwatch: Stopwatch) -> None:
        super().__init__(sent, deadline)
        self._stopwatch = stopwatch
        stopwatch.begin()

    def answer(self, index: int, reply: Any) -> None:
        if not isinstance(reply, Exception):  # also where the connection is lost
            self._stopwatch.end()
        super().answer(index, reply)
