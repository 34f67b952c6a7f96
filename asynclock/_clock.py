"""The clock of this machine, and waits by a clock. Seconds everywhere.

Validity is counted on CLOCK_BOOTTIME where the system has it. That clock does not jump with the wall clock, and it goes
on while the machine sleeps, as a lease on the server does. The wall clock only starts fencing tokens and order keys.
"""

from __future__ import annotations

import asyncio
import functools
import time
from contextlib import asynccontextmanager
from contextvars import Context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asynclock._time import Clock, Timer

if hasattr(time, "CLOCK_BOOTTIME"):
    now: Callable[[], float] = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)
else:  # macOS: its monotonic clock may stand still while the machine sleeps (docs/safety.md)
    now = time.monotonic


class SystemClock:
    """The machine's own clock."""

    now = staticmethod(now)
    wall = staticmethod(time.time)

    @staticmethod
    def call_at(when: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0.0, when - now()), callback, context=Context())


SYSTEM = SystemClock()


LATE = 0.01
"""Seconds. A timer that fires later than this shows that the event loop was blocked."""

READING = 1.0
"""Seconds for which a loop that was blocked at the end of a time limit reads what has come meanwhile, at most."""

_STEPS = 100
"""The number of timers in one time limit: each measures a part of it. A first connection takes 50 turns of the loop."""


def reading_time(late: float) -> float:
    """How long a limit goes on whose timer was late by so much. Then the loop was blocked, and an answer may be there
    that nobody has read: asyncio tells it a turn after the timers, uvloop looks for it after them. 0: no longer."""
    return min(late, READING) if late > LATE else 0.0


@asynccontextmanager
async def running_for(limit: float, clock: Clock = SYSTEM) -> AsyncIterator[None]:
    """As asyncio.timeout, for an answer of a server. Time in which the loop was blocked does not count: the answer may
    have come, and the program was too busy to read it. So the limit is stretched by the delays of its timers that are
    longer than LATE, and by no more. A loop that is blocked in every turn has _STEPS turns: in each it reads what has
    come. After a last timer that was late, one more part follows."""
    loop = asyncio.get_running_loop()
    step = limit / _STEPS
    passed, due = 0.0, 0.0
    timer: Timer | None = None

    def begin_part() -> None:
        nonlocal timer, due
        due = clock.now() + (min(step, limit - passed) if passed < limit else step)
        timer = clock.call_at(due, end_part)

    def end_part() -> None:
        nonlocal passed
        was_last, late = passed >= limit, clock.now() - due
        passed += step if late > LATE else step + late
        if passed < limit or (late > LATE and not was_last):
            begin_part()
        else:
            scope.reschedule(loop.time())

    async with asyncio.timeout(None) as scope:
        begin_part()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()


async def sleep(seconds: float, clock: Clock) -> None:
    """As asyncio.sleep, by that clock."""
    sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timer = clock.call_at(clock.now() + seconds, functools.partial(wake, sleeper))
    try:
        await sleeper
    finally:
        timer.cancel()


async def wait_ended(work: asyncio.Future[Any], seconds: float | None, clock: Clock = SYSTEM) -> None:
    """Wait for the end of a task of the library, for at most `seconds`; None: as long as it takes. A timer that was
    cancelled keeps its context until its time has come, so that of `asyncio.wait` would keep the caller's."""
    ended = asyncio.Event()

    def end(_: object = None) -> None:
        ended.set()

    timer = None if seconds is None else clock.call_at(clock.now() + seconds, end)
    work.add_done_callback(end, context=Context())
    try:
        await ended.wait()
    finally:
        if timer is not None:
            timer.cancel()
        work.remove_done_callback(end)


def wake(sleeper: asyncio.Future[None]) -> None:
    """Wake a task that waits for `sleeper`, unless it is done."""
    if not sleeper.done():
        sleeper.set_result(None)
