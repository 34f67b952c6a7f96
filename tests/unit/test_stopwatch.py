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
    stopwatch, waiting = Stopwatch(clock), deque[Any]([handler])
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
    stopwatch, waiting = Stopwatch(FakeClock()), deque[Any]([handler])
    stopwatch.time_last(waiting, handler)
    waiting[0].fail(3, error, maybe=True)
    assert handler.told == [(3, error, True)]
    assert stopwatch() is None


def test_an_op_that_is_not_the_last_in_flight_is_left_alone() -> None:
    """The connection may have been lost while the op was sent: then its handler has its failure already."""
    stopwatch = Stopwatch(FakeClock())
    empty, others = deque[Any](), deque[Any]([other := Handler()])
    stopwatch.time_last(empty, Handler())
    stopwatch.time_last(others, Handler())
    assert not empty
    assert list(others) == [other]


# -- the distance ------------------------------------------------------------------------------------------------------


class Trips:
    """A stopwatch on a clock that the test moves, and the limits that it told."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.told: list[float] = []
        self.stopwatch = Stopwatch(self.clock, self.told.append)

    def op(self, seconds: float, *, blocked: float = 0.0, at_first: float = 0.0, before: bool = False) -> None:
        """An op that is answered after so many seconds. The loop is blocked in the last `blocked` or in the first
        `at_first` of them. `before`: another command is in flight."""
        handler = Handler(self.clock.now())
        waiting = deque[Any]([Handler(), handler] if before else [handler])
        self.stopwatch.time_last(waiting, handler)
        if at_first:
            self.clock.block(at_first)
        self.clock.advance(seconds - blocked - at_first)
        self.clock.block(blocked)
        waiting[-1].answer(0, (1, False))


def test_f17_the_limit_follows_the_round_trips() -> None:
    """At most twofold with each, never below the floor, and above the round trip in the end, also if it never
    varies."""
    trips = Trips()
    trips.op(0.001)
    assert trips.stopwatch.distance.limit == 0.05
    assert not trips.told
    before = 0.05
    for _ in range(100):
        trips.op(0.081)
        limit = trips.stopwatch.distance.limit
        assert limit <= 2 * before
        before = limit
    assert 2 * 0.081 <= before <= 2.2 * 0.081
    assert trips.told[-1] == before
    for _ in range(100):
        trips.op(0.001)
    assert trips.stopwatch.distance.limit == 0.05


def test_f17_four_answers_are_enough() -> None:
    """So many round trips has a handshake: the first acquire works at 81 ms, and at 250 ms."""
    for round_trip in (0.03, 0.081, 0.25):
        trips = Trips()
        for _ in range(4):
            trips.op(round_trip)
        assert trips.stopwatch.distance.limit >= 1.5 * round_trip


def test_f17_one_wrong_sample() -> None:
    """It raises the limit once, although it stays in the mean for a while."""
    trips = Trips()
    for _ in range(10):
        trips.op(0.001)
    trips.op(1.9)
    for _ in range(10):
        trips.op(0.001)
        assert trips.stopwatch.distance.limit <= 0.1


@pytest.mark.parametrize("how", ["blocked", "at_first"])
def test_f17_a_late_turn_of_the_loop_is_no_sample(how: str) -> None:
    """The program was busy as the op left, or as the answer came."""
    trips = Trips()
    for _ in range(5):
        trips.op(0.3, **{how: 0.1})
    assert trips.stopwatch.distance.usual is None
    assert trips.stopwatch() is not None


def test_f17_an_op_behind_another_is_no_sample() -> None:
    """It may wait for the other one."""
    trips = Trips()
    trips.op(0.3, before=True)
    assert trips.stopwatch.distance.usual is None


def test_f17_a_late_answer_is_a_sample() -> None:
    """The handler has failed by then."""
    trips = Trips()
    handler = Handler(trips.clock.now())
    waiting = deque[Any]([handler])
    trips.stopwatch.time_last(waiting, handler)
    waiting[0].fail(0, TimeoutError(), maybe=True)
    trips.clock.advance(0.4)
    waiting[0].answer(0, (1, False))
    assert trips.stopwatch.distance.usual == pytest.approx(0.4)


async def test_f17_a_command_of_the_handshake() -> None:
    """Its answer is a sample; the loss of its connection is none. Without a use for it nothing is measured."""
    trips = Trips()
    for reply in (b"OK", ConnectionError()):
        waiting = deque[Any]()
        now = trips.clock.now()
        command = trips.stopwatch.reply(waiting, now, now + 5.0)
        trips.clock.advance(0.081)
        command.answer(0, reply)
    assert trips.stopwatch.distance.usual == pytest.approx(0.081)
    clock = FakeClock()
    Stopwatch(clock).reply(deque(), 0.0, 5.0)
    assert clock.armed == 0


def test_a_command_without_an_answer_leaves_no_timer() -> None:
    """The timer beside it ends by itself."""
    trips = Trips()
    handler = Handler(trips.clock.now())
    trips.stopwatch.time_last(deque[Any]([handler]), handler)
    assert trips.clock.armed == 1
    trips.clock.advance(3.0)
    assert trips.clock.armed == 0
