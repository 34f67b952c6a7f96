"""The watchdog: what is due, and when it looks; on a clock that stands still until moved."""

from __future__ import annotations

import gc
import logging
import math
from typing import Any
from weakref import ref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynclock.acquire.watchdog import RETRY, TICK, Due, Watchdog, due, retry_after
from tests.support.fake_clock import FakeClock

NEVER = math.inf
ROUNDING = 1e-9  # of spokes as floats


class Watched:
    """Notes when it is looked at; wants to be looked at again after each of `pauses`."""

    def __init__(self, *pauses: float | Exception) -> None:
        self._slot = 0
        self._own: ref[Any] = ref(self)
        self.looks: list[float] = []
        self._pauses = list(pauses)

    def _look(self, now: float) -> float | None:
        self.looks.append(now)
        pause = self._pauses.pop(0) if self._pauses else None
        if isinstance(pause, Exception):
            raise pause
        return None if pause is None else now + pause


@pytest.mark.parametrize(
    ("ends", "renew_at", "hold_until", "expected"),
    [
        (30.0, 20.0, NEVER, Due.NOTHING),
        (30.0, 10.0, NEVER, Due.RENEWAL),
        (30.0, 9.0, NEVER, Due.RENEWAL),
        (10.0, 20.0, NEVER, Due.EXPIRED),
        (10.0, 5.0, NEVER, Due.EXPIRED),  # nobody renews what is over
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
    pauses = {retry_after(12.0) for _ in range(50)}
    assert all(0.8 <= pause / (12.0 * RETRY) <= 1.0 for pause in pauses)
    assert len(pauses) > 1


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(
    whens=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=8),
    pauses=st.lists(st.floats(0.001, 3.0), max_size=4),
    steps=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8),
    early=st.sampled_from([0.0, 0.001]),
)
def test_looks_come_in_time(whens: list[float], pauses: list[float], steps: list[float], early: float) -> None:
    """Never early, and a tick late at most: the first and those that a look asked for, though timers fire early."""
    clock = FakeClock(early=early)
    dog = Watchdog(clock)
    all_watched = [Watched(*pauses) for _ in whens]
    begun = clock.now()
    for watched, when in zip(all_watched, whens, strict=True):
        dog.watch(watched, begun + when)
    for step in (*steps, 20.0):
        clock.advance(step)
    for watched, when in zip(all_watched, whens, strict=True):
        wanted = begun + when
        assert len(watched.looks) == 1 + len(pauses)
        for looked, pause in zip(watched.looks, (*pauses, 0.0), strict=True):
            assert wanted - ROUNDING <= looked <= wanted + TICK + early + ROUNDING
            wanted = looked + pause


def test_a_look_far_ahead_delays_no_other() -> None:
    """One that asks for a late look does not put off another that is due before."""
    clock = FakeClock()
    dog = Watchdog(clock)
    far, near = Watched(100.0), Watched()
    dog.watch(far, clock.now() + 1.0)
    dog.watch(near, clock.now() + 2.0)
    clock.advance(3.0)
    assert len(near.looks) == 1


def test_an_earlier_look_brings_the_timer_forward() -> None:
    """Whoever comes later may be due sooner."""
    clock = FakeClock()
    dog = Watchdog(clock)
    later, sooner = Watched(), Watched()
    dog.watch(later, clock.now() + 2.0)
    dog.watch(sooner, clock.now() + 1.0)
    clock.advance(1.5)
    assert (len(sooner.looks), len(later.looks)) == (1, 0)


def test_a_thousand_leases_cost_one_timer() -> None:
    """However many are watched."""
    clock = FakeClock()
    dog = Watchdog(clock)
    many = [Watched() for _ in range(1_000)]
    for i, watched in enumerate(many):
        dog.watch(watched, clock.now() + i / 100)
    assert (clock.armed, len(list(dog))) == (1, 1_000)


def test_b1_after_a_blocked_loop_each_is_looked_at_once() -> None:
    """What was due while nothing could run is due once, in order."""
    clock = FakeClock()
    dog = Watchdog(clock)
    many = [Watched() for _ in range(3)]
    for i, watched in enumerate(many):
        dog.watch(watched, clock.now() + 1.0 + i)
    clock.block(60.0)
    clock.advance(0.0)
    assert [watched.looks for watched in many] == [[1_060.0]] * 3


def test_who_is_forgotten_is_looked_at_no_more() -> None:
    """Those beside it still are."""
    clock = FakeClock()
    dog = Watchdog(clock)
    gone, stays = Watched(), Watched()
    for watched in (gone, stays):
        dog.watch(watched, clock.now() + 1.0)
    dog.forget(gone)
    assert list(dog) == [stays]
    clock.advance(2.0)
    assert (len(gone.looks), len(stays.looks)) == (0, 1)


def test_forget_is_harmless_for_who_is_not_watched() -> None:
    """Never watched, forgotten before, and looked at for the last time."""
    clock = FakeClock()
    dog = Watchdog(clock)
    watched = Watched()
    dog.forget(watched)
    dog.watch(watched, clock.now() + 1.0)
    dog.forget(watched)
    dog.forget(watched)
    dog.watch(watched, clock.now() + 1.0)
    clock.advance(2.0)
    dog.forget(watched)
    assert (len(watched.looks), list(dog)) == (1, [])


def test_a15_the_watchdog_keeps_nobody_alive() -> None:
    """A lease that was dropped is collected, and looked at no more."""
    clock = FakeClock()
    dog = Watchdog(clock)
    dropped = Watched(1.0)
    looks = dropped.looks
    dog.watch(dropped, clock.now() + 1.0)
    del dropped
    gc.collect()
    assert list(dog) == []
    clock.advance(2.0)
    assert (looks, clock.armed) == ([], 0)


def test_a5_a_look_that_raises_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and looked at again soon, until it answers."""
    clock = FakeClock()
    dog = Watchdog(clock)
    failing = Watched(RuntimeError("bug"), RuntimeError("again"), 1.0)
    dog.watch(failing, clock.now() + 1.0)
    with caplog.at_level(logging.ERROR, "asynclock"):
        clock.advance(1.5)
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert len(failing.looks) == 3
    clock.advance(1.0)
    assert len(failing.looks) == 4


def test_a5_a_look_that_raises_harms_no_other() -> None:
    """Who is due in the same turn, or later, is looked at."""
    clock = FakeClock()
    dog = Watchdog(clock)
    failing = [Watched(RuntimeError("bug")) for _ in range(5)]
    sound = [Watched(), Watched(), Watched()]
    for watched in (*failing, *sound[:2]):
        dog.watch(watched, clock.now() + 1.0)
    dog.watch(sound[2], clock.now() + 1.2)
    clock.advance(2.0)
    assert [len(watched.looks) for watched in sound] == [1, 1, 1]


def test_a_stopped_watchdog_looks_no_more() -> None:
    """And leaves no timer behind."""
    clock = FakeClock()
    dog = Watchdog(clock)
    watched = Watched()
    dog.watch(watched, clock.now() + 1.0)
    dog.stop()
    clock.advance(2.0)
    assert (watched.looks, clock.armed) == ([], 0)
