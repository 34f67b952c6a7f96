"""The watchdog: what is due, and when it looks; on a clock that stands still until moved."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from random import random
from typing import Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynclock import Redlock
from asynclock._flood import BURST
from asynclock.protocol.watchdog import RETRY, TICK, Due, Lacking, LoopLag, Watchdog, due, retry_after
from asynclock.stores.memory import MemoryStore
from tests.support.fake_clock import FakeClock, FakeTimer
from tests.support.probes import in_wheel, session_of

NEVER = math.inf
NOW = 1_000.0
ROUNDING = 1e-9  # of spokes as floats


class Watched:
    """In the place of a hold: notes the times of its checks; wants a check again after each of `pauses`."""

    def __init__(self, dog: Watchdog, *pauses: float | Exception) -> None:
        self._dog: Any = dog
        self.looks: list[float] = []
        self._pauses = list(pauses)
        self._at: float | None = None

    def watched_at(self, at: float) -> Self:
        self._at = at
        self._dog.watch(self, at)
        return self

    def watch_at(self, at: float) -> None:
        self.watched_at(at)

    def forget(self) -> None:
        self._dog.forget(self, self._at or 0.0)

    def check(self, now: float) -> None:
        self.looks.append(now)
        pause = self._pauses.pop(0) if self._pauses else None
        if isinstance(pause, Exception):
            raise pause
        self._at = None if pause is None else now + pause
        if self._at is not None:
            self._dog.watch(self, self._at)


@pytest.mark.parametrize(
    ("ends", "renew_at", "hold_until", "expected"),
    [
        (30.0, 20.0, NEVER, Due.NOTHING),
        (30.0, 10.0, NEVER, Due.RENEWAL),
        (30.0, 9.0, NEVER, Due.RENEWAL),
        (10.0, 20.0, NEVER, Due.EXPIRED),
        (10.0, 5.0, NEVER, Due.EXPIRED),  # an expired hold is not renewed
        (30.0, 20.0, 10.0, Due.MAX_HOLD),
        (30.0, 5.0, 10.0, Due.MAX_HOLD),  # nor what has been held for too long
        (5.0, 5.0, 10.0, Due.MAX_HOLD),
        (30.0, NEVER, NEVER, Due.NOTHING),  # renew=False
        (-NEVER, NEVER, NEVER, Due.EXPIRED),
    ],
)
def test_due(ends: float, renew_at: float, hold_until: float, expected: Due) -> None:
    """What is due at 10."""
    assert due(10.0, ends, renew_at, hold_until) is expected


def test_b10_a_retry_comes_within_a_twelfth_of_the_lease() -> None:
    """And not all at once."""
    pauses = {retry_after(12.0, random) for _ in range(50)}
    assert all(0.8 <= pause / (12.0 * RETRY) <= 1.0 for pause in pauses)
    assert len(pauses) > 1


def test_the_pauses_between_heals_double() -> None:
    """The nodes that refused a contested win are asked after the round trip of the win, at the earliest after a
    millisecond, and then after pauses that double."""
    for round_trip, first in (0.5, 0.5), (0.0, 0.001):
        lacking = Lacking(NOW, round_trip)
        lacking.nodes = 0b100
        now, pause = NOW, first
        for _ in range(4):
            assert lacking.at == now + pause
            now, pause = lacking.at, 2 * pause
            assert lacking.later(now) is lacking


def test_no_node_lacks_a_hold_until_one_has_refused() -> None:
    """Without such a node there is no next time."""
    assert Lacking(NOW, 0.5).later(NOW + 0.5) is None


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(
    whens=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=8),
    pauses=st.lists(st.floats(0.001, 3.0), max_size=4),
    steps=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8),
    early=st.sampled_from([0.0, 0.001]),
)
def test_checks_come_in_time(whens: list[float], pauses: list[float], steps: list[float], early: float) -> None:
    """Never early, and a tick late at most: the first check and those that a check asked for, though timers fire
    early."""
    clock = FakeClock(early=early)
    dog = Watchdog(clock)
    all_watched = [Watched(dog, *pauses) for _ in whens]
    begun = clock.now()
    for watched, when in zip(all_watched, whens, strict=True):
        watched.watched_at(begun + when)
    for step in (*steps, 20.0):
        clock.advance(step)
    for watched, when in zip(all_watched, whens, strict=True):
        wanted = begun + when
        assert len(watched.looks) == 1 + len(pauses)
        for looked, pause in zip(watched.looks, (*pauses, 0.0), strict=True):
            assert wanted - ROUNDING <= looked <= wanted + TICK + early + ROUNDING
            wanted = looked + pause


def test_a_late_check_delays_no_other() -> None:
    """A hold with a late check does not delay another that is due before."""
    clock = FakeClock()
    dog = Watchdog(clock)
    Watched(dog, 100.0).watched_at(clock.now() + 1.0)
    near = Watched(dog).watched_at(clock.now() + 2.0)
    clock.advance(3.0)
    assert len(near.looks) == 1


@pytest.mark.parametrize("order", [(1.0, 2.0), (2.0, 1.0)], ids=["sooner first", "later first"])
def test_the_earliest_check_sets_the_timer(order: tuple[float, float]) -> None:
    """A hold that is added later may be due sooner, or later."""
    clock = FakeClock()
    dog = Watchdog(clock)
    watched = {after: Watched(dog).watched_at(clock.now() + after) for after in order}
    clock.advance(1.5)
    assert (len(watched[1.0].looks), len(watched[2.0].looks)) == (1, 0)


def test_a_thousand_leases_cost_one_timer() -> None:
    """However many are watched."""
    clock = FakeClock()
    dog = Watchdog(clock)
    for i in range(1_000):
        Watched(dog).watched_at(clock.now() + i / 100)
    assert (clock.armed, len(in_wheel(dog))) == (1, 1_000)


def test_b1_after_a_blocked_loop_each_is_checked_once() -> None:
    """Checks that were due while nothing could run are done once, in order."""
    clock = FakeClock()
    dog = Watchdog(clock)
    many = [Watched(dog).watched_at(clock.now() + 1.0 + i) for i in range(3)]
    clock.block(60.0)
    clock.advance(0.0)
    assert [watched.looks for watched in many] == [[1_060.0]] * 3


def test_a_forgotten_hold_is_not_checked_any_more() -> None:
    """Those beside it still are."""
    clock = FakeClock()
    dog = Watchdog(clock)
    gone, stays = [Watched(dog).watched_at(clock.now() + 1.0) for _ in range(2)]
    gone.forget()
    assert in_wheel(dog) == [stays]
    clock.advance(2.0)
    assert (len(gone.looks), len(stays.looks)) == (0, 1)


def test_a_look_may_end_another_that_is_due() -> None:
    """One that is due in the same turn, alone in its slot, is forgotten by the look at the first. The others are still
    looked at."""
    clock = FakeClock()
    dog = Watchdog(clock)
    gone, after = (Watched(dog).watched_at(clock.now() + 1.0 + later) for later in (0.1, 0.2))

    class Ends(Watched):
        def check(self, now: float) -> None:
            gone.forget()
            super().check(now)

    first = Ends(dog).watched_at(clock.now() + 1.0)
    clock.block(2.0)
    clock.advance(0.0)
    assert (len(first.looks), len(gone.looks), len(after.looks)) == (1, 0, 1)


def test_forgetting_an_unwatched_hold_is_harmless() -> None:
    """Never watched, forgotten before, and checked for the last time."""
    clock = FakeClock()
    dog = Watchdog(clock)
    watched = Watched(dog)
    watched.forget()
    watched.watched_at(clock.now() + 1.0)
    watched.forget()
    watched.forget()
    watched.watched_at(clock.now() + 1.0)
    clock.advance(2.0)
    watched.forget()
    assert (len(watched.looks), in_wheel(dog)) == (1, [])


def test_a5_a_check_that_raises_is_repeated() -> None:
    """It is reported, and repeated after 50 ms, until it succeeds. At once would keep the loop busy."""
    clock, faults = FakeClock(), list[tuple[object, Exception]]()
    dog = Watchdog(clock, fault=lambda *what: faults.append(what))
    bugs = RuntimeError("bug"), RuntimeError("again")
    failing = Watched(dog, *bugs, 1.0).watched_at(clock.now() + 1.0)
    clock.advance(1.5)
    assert faults == [(failing, bug) for bug in bugs]
    assert len(failing.looks) == 3
    for before, after in itertools.pairwise(failing.looks):
        assert 0.05 - ROUNDING <= after - before <= 0.06 + ROUNDING
    clock.advance(1.0)
    assert len(failing.looks) == 4


async def test_a5_a_flood_of_checks_that_raise_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A store that raises does so for each hold, twenty times a second. Each check is repeated, logged or not."""
    clock = FakeClock()
    async with Redlock(MemoryStore(clock)) as client:
        dog = session_of(client).machine.watchdog
        holds = [Watched(dog, RuntimeError("bug"), 1.0).watched_at(clock.now() + 1.0) for _ in range(3 * BURST)]
        clock.advance(2.0)
        assert all(len(each.looks) == 2 for each in holds)
    assert "RuntimeError: bug" in caplog.text
    assert caplog.text.count("will try again") == BURST
    assert f"and {2 * BURST} more checks of the watchdog that failed" in caplog.text


def test_a5_a_check_that_raises_harms_no_other() -> None:
    """Other holds that are due in the same turn, or later, are checked."""
    clock = FakeClock()
    dog = Watchdog(clock)
    for _ in range(5):
        Watched(dog, RuntimeError("bug")).watched_at(clock.now() + 1.0)
    sound = [Watched(dog).watched_at(clock.now() + after) for after in (1.0, 1.0, 1.2)]
    clock.advance(2.0)
    assert [len(watched.looks) for watched in sound] == [1, 1, 1]


def test_many_checks_are_done_in_slices_of_a_millisecond() -> None:
    """A turn of the loop ends with the check at which that time is over. The other tasks of the loop run before the
    next one, and the checks that were due first come first."""
    spent, slices = [1_000.0], list[list[Watched]]()

    class Turns(FakeClock):
        def call_at(self, when: float, callback: Callable[[], object]) -> FakeTimer:
            return super().call_at(when, lambda: (slices.append([]), callback()))

    class Costly(Watched):
        def check(self, now: float) -> None:
            super().check(now)
            slices[-1].append(self)
            spent[0] += 0.0003

    clock = Turns()
    dog = Watchdog(clock, spent=lambda: spent[0])
    many = [Costly(dog).watched_at(clock.now() + 1.0 + i) for i in range(10)]
    clock.block(60.0)
    clock.advance(0.0)
    assert slices == [many[:4], many[4:8], many[8:]]


def test_a_stopped_watchdog_checks_no_more() -> None:
    """It leaves no timer behind, refers to no hold, and expects no beat of the loop."""
    clock, lag = FakeClock(), LoopLag()
    lag.use(30.0)
    dog = Watchdog(clock, lag)
    watched = Watched(dog).watched_at(clock.now() + 1.0)
    dog.stop()
    assert (clock.armed, dog.is_armed, in_wheel(dog)) == (0, False, [])
    clock.advance(100.0)
    assert watched.looks == []
    assert lag.last_block(clock.now()) is None


def test_a_watchdog_without_holds_soon_has_no_timer() -> None:
    """The only hold was released before its next check was due. The timer ends with the next beat, after a twelfth of
    the lease at the latest."""
    clock, lag = FakeClock(), LoopLag()
    lag.use(30.0)
    dog = Watchdog(clock, lag)
    watched = Watched(dog).watched_at(clock.now() + 10.0)
    assert dog.is_armed
    watched.forget()
    clock.advance(2.5)
    assert (clock.armed, dog.is_armed) == (0, False)
