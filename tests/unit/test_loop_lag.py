"""How late the event loop is: when it counts as blocked, what the log says, and what the watch costs. A test moves the
clock, except where the real loop is the subject."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from asynclock import LockLost, Redlock
from asynclock.events import Event, LoopLagged
from asynclock.protocol.watchdog import RENEWALS, TICK, LoopLag, Watchdog
from asynclock.quorum.ballot import Ballot
from asynclock.stores.memory import MemoryStore
from tests.support.blocked_loop import lag_of
from tests.support.fake_clock import FakeClock
from tests.support.kinds_of_node import in_memory
from tests.support.probes import replace_ask
from tests.support.still_clock import turns

pytestmark = pytest.mark.both_loops("it measures the loop")

BLOCKED = "the event loop did not run"


def client_and_clock(lease: float = 30.0) -> tuple[Redlock, FakeClock]:
    clock = FakeClock()
    return Redlock(MemoryStore(clock), lease=lease), clock


async def test_a_loop_blocked_for_a_third_of_the_lease_is_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, with the seconds (which a twelfth of the lease may be missing from) and with what to do."""
    redlock, clock = client_and_clock()
    async with redlock(name):
        clock.advance(4.0)
        clock.block(13.0)
        clock.advance(0.0)
        clock.advance(5.0)
    [record] = [each for each in caplog.records if BLOCKED in each.message]
    assert (record.name, record.levelname) == ("asynclock", "WARNING")
    assert 13.0 - 2.5 <= record.asynclock_seconds <= 13.0  # type: ignore[attr-defined]
    assert "asyncio.to_thread" in record.message
    assert "renew='thread'" in record.message
    await redlock.aclose()


async def test_listeners_are_told(name: str) -> None:
    """The event has the seconds that the log has."""
    redlock, clock = client_and_clock()
    told: list[Event] = []
    redlock.subscribe(told.append)
    async with redlock(name):
        clock.block(13.0)
        clock.advance(0.0)
    [seconds] = [event.seconds for event in told if isinstance(event, LoopLagged)]
    assert 13.0 - 2.5 <= seconds <= 13.0
    await redlock.aclose()


async def test_a_shorter_block_is_remembered_and_not_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its length and its end can be asked for. A loop that is on time has no block."""
    redlock, clock = client_and_clock()
    async with redlock(name):
        clock.advance(8.0)
        assert lag_of(redlock).last_block(clock.now()) is None
        clock.block(9.0)
        clock.advance(0.0)
        clock.advance(5.0)
        seconds, ended = lag_of(redlock).last_block(clock.now())
        assert 9.0 - 2.5 <= seconds <= 9.0
        assert ended == clock.now() - 5.0
    assert not [each for each in caplog.records if BLOCKED in each.message]
    await redlock.aclose()


async def test_a_block_is_known_before_any_timer_fires(name: str) -> None:
    """The task that blocked the loop learns of it, as often as it asks; the log has it once the loop runs."""
    redlock, clock = client_and_clock()
    async with redlock(name):
        clock.advance(1.0)
        clock.block(15.0)
        for _ in range(2):
            seconds, ended = lag_of(redlock).last_block(clock.now())
            assert 15.0 - 2.5 <= seconds <= 15.0
            assert ended == clock.now()
        clock.advance(0.0)
    await redlock.aclose()


async def test_an_overdue_timer_that_is_replaced_counts(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A task that acquires right after the block moves the timer before it fires."""
    redlock, clock = client_and_clock()
    async with redlock(name):
        async with redlock(f"{name}:2", lease=6.0):
            pass
        clock.advance(2.5)  # from now on the timer waits for the first lock
        clock.block(5.0)
        async with redlock(f"{name}:2", lease=6.0):
            pass
    assert [each for each in caplog.records if BLOCKED in each.message]
    await redlock.aclose()


async def test_the_shortest_lease_decides(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A lock with a shorter lease than the client's is in danger sooner."""
    redlock, clock = client_and_clock()
    async with redlock(name), redlock(f"{name}:2", lease=3.0):
        clock.block(1.5)
        clock.advance(0.0)
    [record] = [each for each in caplog.records if BLOCKED in each.message]
    assert record.asynclock_seconds <= 1.5  # type: ignore[attr-defined]
    await redlock.aclose()


async def test_the_watch_costs_no_timer_of_its_own(name: str) -> None:
    """A client with holds has the one timer of its watchdog; a client without holds soon has none."""
    redlock, clock = client_and_clock()
    async with redlock(name), redlock(f"{name}:2"):
        for _ in range(20):
            clock.advance(1.0)
            assert clock.armed == 1
    clock.advance(30.0)
    assert clock.armed == 0
    clock.block(100.0)
    assert lag_of(redlock).last_block(clock.now()) is None
    await redlock.aclose()


async def test_a_loss_soon_after_a_block_names_it(name: str) -> None:
    """The renewal after the block had too little time: it had no reply when the lease ended."""
    redlock, clock = client_and_clock()
    lease = await redlock(name).acquire(timeout=0)
    assert lease is not None
    clock.block(25.0)
    ask = replace_ask(redlock, lambda op, *args, **kwargs: Ballot(op, 1, 0.0, 0.0))
    clock.advance(10.0)
    with pytest.raises(LockLost, match=r"the event loop did not run for 2\d"):
        lease.ensure_held()
    replace_ask(redlock, ask)
    await redlock.aclose()


async def test_a_block_before_a_renewal_that_was_granted_is_not_named(name: str) -> None:
    """That renewal was sent as soon as the loop ran again. What ends the lease later is something else."""
    redlock, clock = client_and_clock()
    lease = await redlock(name).acquire(timeout=0)
    assert lease is not None
    clock.block(25.0)
    clock.advance(0.0)
    await turns()
    ask = replace_ask(redlock, lambda op, *args, **kwargs: Ballot(op, 1, 0.0, 0.0))
    clock.advance(25.0)
    assert lease.held
    clock.advance(10.0)
    with pytest.raises(LockLost) as lost:
        lease.ensure_held()
    assert BLOCKED not in str(lost.value)
    replace_ask(redlock, ask)
    await redlock.aclose()


class Held:
    """In the place of a hold: after each check it wants the next one `pause` seconds later; None: the check ends it."""

    def __init__(self, dog: Watchdog, pause: float | None = None) -> None:
        self._dog, self._pause = dog, pause

    def check(self, now: float) -> None:
        if self._pause is not None:
            self.watch_at(now + self._pause)

    def watch_at(self, at: float) -> None:
        self._dog.watch(self, at)


def watched() -> tuple[FakeClock, LoopLag, Watchdog, list[float]]:
    """A watchdog for leases of 30 s, and the lags that are reported."""
    clock, lags = FakeClock(), list[float]()
    lag = LoopLag(lags.append)
    lag.use(30.0)
    return clock, lag, Watchdog(clock, lag), lags


def test_a_check_that_takes_a_moment_is_no_block() -> None:
    """The timer is set again at the end of it."""
    clock, lag, dog, lags = watched()

    class Working(Held):
        def check(self, now: float) -> None:
            clock.block(0.001)
            super().check(now)

    Working(dog, 1.0).watch_at(clock.now() + 1.0)
    clock.advance(10.0)
    assert lag.last_block(clock.now()) is None
    assert lags == []


def test_a_block_that_begins_right_after_a_check_is_known() -> None:
    """The check has set the next one, so the timer runs already when the turn of the watchdog ends."""
    clock, lag, dog, _ = watched()
    Held(dog, 10.0).watch_at(clock.now() + 1.0)
    clock.advance(1.0 + TICK)
    clock.block(20.0)
    block = lag.last_block(clock.now())
    assert block is not None
    assert 20.0 - 2.5 <= block.seconds <= 20.0


def test_a_block_is_measured_from_the_time_of_the_timer() -> None:
    """The check was due before the next beat."""
    clock, lag, dog, _ = watched()
    Held(dog).watch_at(clock.now() + 0.5)
    clock.block(20.0)
    block = lag.last_block(clock.now())
    assert block is not None
    assert 19.5 - TICK <= block.seconds <= 19.5


def test_a_block_that_has_ended_the_last_hold_is_reported() -> None:
    """No other check follows, and no beat."""
    clock, _, dog, lags = watched()
    Held(dog).watch_at(clock.now() + 0.5)
    clock.block(20.0)
    clock.advance(0.0)
    assert clock.armed == 0
    assert len(lags) == 1
    assert 19.5 - TICK <= lags[0] <= 19.5


NOW = 1_000.0


@pytest.mark.parametrize(
    ("block", "due", "expected"),
    [
        (None, -math.inf, 0.0),  # no check was due
        (None, NOW - 7.0, 7.0),  # the watchdog had other holds to check first
        (NOW - 1.0, NOW - 7.0, 20.0),
        (NOW - 1.0, NOW - 22.0, 22.0),
        (NOW - 1.0, -math.inf, 20.0),
        (NOW - 5.0, NOW - 7.0, 7.0),  # the renewal was sent when the loop ran again
        (NOW - 6.0, -math.inf, 0.0),
    ],
)
def test_how_late_the_loop_was_for_a_hold(block: float | None, due: float, expected: float) -> None:
    """A hold was renewed 5 s ago. A block of 20 s has ended at `block`, and a check of the hold is due since `due`."""
    lag = LoopLag()
    lag.use(30.0)
    if block is not None:
        lag.expect(block - 20.0)
        lag.beat(block)
    lag.expect(NOW)
    assert lag.late(NOW, due, since=NOW - 5.0) == expected


class Slow:
    """In the place of a hold: each check takes longer than a slice."""

    def check(self, now: float) -> None:
        del now
        began = time.perf_counter()
        while time.perf_counter() - began <= RENEWALS:
            pass

    def watch_at(self, at: float) -> None: ...


def test_the_slices_after_a_block_are_no_blocks() -> None:
    """The checks that were due meanwhile are done in several turns of the loop. Only the first of these is late."""
    clock, lag, _, lags = watched()
    dog = Watchdog(clock, lag, spent=time.perf_counter)
    for _ in range(3):
        dog.watch(Slow(), clock.now() + 10.0)  # type: ignore[arg-type]
    clock.advance(1.0)
    clock.block(20.0)
    clock.advance(0.0)
    assert len(lags) == 1
    assert clock.armed == 0


@in_memory
async def test_a_call_that_blocks_the_loop_is_logged(
    make: Callable[..., Redlock], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On a real loop and a real clock. A busy machine may block it for longer, until the lease is lost."""
    with caplog.at_level(logging.WARNING, "asynclock"):
        lease = await make()(name, lease=1.2).acquire(timeout=None)
        time.sleep(0.6)  # to block the loop is what this test is about
        while BLOCKED not in caplog.text:
            await asyncio.sleep(0)
        with suppress(LockLost):
            await lease.release()
