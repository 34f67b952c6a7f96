"""Measures the round trips of one connection: one op at a time, so that the others cost nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from asynclock.rules.model import Op
    from asynclock.stores.port import Grant, Refused, ReplyHandler, Undone
    from asynclock.stores.redis.connection import CommandReply


class Stopwatch:
    """Keeps the last round trip that was measured, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._last: float | None = None

    def __call__(self) -> float | None:
        """The rtt of `port.Measured`."""
        return self._last

    def time_last(self, waiting: deque[ReplyHandler | CommandReply], handler: ReplyHandler) -> None:
        """Measure the op of this handler, if it was sent last and has no answer yet."""
        if waiting and waiting[-1] is handler:
            waiting[-1] = _Timed(handler, self.answered)

    def answered(self, sent: float) -> None:
        """The op that is measured was answered."""
        self._last = self._now() - sent


class _Timed:
    """Stands in for the handler of an op, and measures when the server answers."""

    __slots__ = ("_answered", "_handler", "deadline", "op", "sent")

    def __init__(self, handler: ReplyHandler, answered: Callable[[float], None]) -> None:
        self.op: Op = handler.op
        self.sent = handler.sent
        self.deadline = handler.deadline
        self._handler = handler
        self._answered = answered

    def answer(self, index: int, reply: Grant | Refused | Undone) -> None:
        self._answered(self.sent)
        self._handler.answer(index, reply)

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None:
        self._handler.fail(index, error, maybe=maybe)
