"""The stopwatch of a connection: it measures one op at a time, and passes the answer on."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from asynclock.rules.model import EXTEND, Op
from asynclock.rules.mutex import MUTEX
from asynclock.stores.port import UNDONE, Grant, Refused, Undone
from asynclock.stores.redis.stopwatch import Stopwatch
from tests.support.fake_clock import FakeClock


class Handler:
    """Notes what it is told."""

    def __init__(self, sent: float = 0.0) -> None:
        self.op = Op(EXTEND, MUTEX, "k", "id", 1.0)
        self.sent = sent
        self.deadline = sent + 1.0
        self.told: list[Any] = []

    def answer(self, index: int, reply: Grant | Refused | Undone) -> None:
        self.told.append((index, reply))

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None:
        self.told.append((index, error, maybe))


@pytest.mark.parametrize("reply", [(7, False), Refused(1.0), UNDONE])
def test_an_answer_is_measured_and_passed_on(reply: Any) -> None:
    """From the time when the op was sent; the handler gets the answer unchanged."""
    clock, handler = FakeClock(), Handler(sent=1_000.0)
    stopwatch, waiting = Stopwatch(clock.now), deque[Any]([handler])
    assert stopwatch() is None
    stopwatch.time_last(waiting, handler)
    clock.advance(0.25)
    (timed,) = waiting
    assert (timed.op, timed.sent, timed.deadline) == (handler.op, handler.sent, handler.deadline)
    timed.answer(3, reply)
    assert handler.told == [(3, reply)]
    assert stopwatch() == 0.25


def test_a_failure_is_passed_on_and_not_measured() -> None:
    """An op without an answer has no round trip."""
    handler, error = Handler(), TimeoutError()
    stopwatch, waiting = Stopwatch(FakeClock().now), deque[Any]([handler])
    stopwatch.time_last(waiting, handler)
    waiting[0].fail(3, error, maybe=True)
    assert handler.told == [(3, error, True)]
    assert stopwatch() is None


def test_an_op_that_is_not_the_last_in_flight_is_left_alone() -> None:
    """The connection may have been lost while the op was sent: then its handler has its failure already."""
    stopwatch = Stopwatch(FakeClock().now)
    empty, others = deque[Any](), deque[Any]([other := Handler()])
    stopwatch.time_last(empty, Handler())
    stopwatch.time_last(others, Handler())
    assert not empty
    assert list(others) == [other]
