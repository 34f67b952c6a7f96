"""FakeClock: time that a test moves, for all clients of its stores.

Time stands still until `advance`, or until nothing else can run (`autojump`). Then it goes to the next moment at which
something is due, calls that, and waits until the tasks that it woke have run as far as they can. So a client sees each
moment of a long time, and nothing is skipped.

How far tasks have run is read from the tasks of the event loop: one that waits for nothing, or for a future that is
done, runs in a later turn. Between two tasks may be callbacks, a few turns of the loop long.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import threading
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

from asynclock._clock import wake
from asynclock._loop import own_task, running_loop

if TYPE_CHECKING:
    from collections.abc import Callable

    _Waits: TypeAlias = dict[asyncio.Task[Any], object]

_START = 1_000_000_000.0
"""`now()` of a new clock, in seconds."""

_EPOCH = 1_700_000_000.0 - _START
"""`wall() - now()`: the first day is 14 November 2023."""

_TURNS = 16
"""So many turns of the loop without a task that can run show that all wait: an acquire over several nodes
is a chain of callbacks."""

_MOST = 480
"""Turns of the loop that one moment lasts at most: a task may run in every turn, without end."""

_FOREIGN = 1.0
"""Seconds of real time for which a moment waits for another event loop, which may be busy."""

_ROUNDS = 8
"""So often a moment asks all event loops, at most: a task may run in every turn, without end."""

_movers: WeakSet[asyncio.Task[Any]] = WeakSet()
"""The tasks that move a clock, and those that wait for that: time does not wait for them."""


def _can_run(task: asyncio.Task[Any]) -> bool:
    if task in _movers:
        return False
    awaited = getattr(task, "_fut_waiter", None)
    return awaited is None or awaited.done()


async def _end_of(movement: Future[None]) -> None:
    """Wait for the end of a movement, which may be in another loop. `asyncio.wrap_future` would pass a cancel of the
    waiting task on to it."""
    loop = running_loop()
    ended = loop.create_future()

    def tell(_: object) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(wake, ended)

    movement.add_done_callback(tell)
    await ended


class FakeTimer:
    """The result of `FakeClock.call_at`."""

    __slots__ = ("_callback", "_clock", "loop")

    def __init__(self, clock: FakeClock, callback: Callable[[], object]) -> None:
        self._clock = clock
        self._callback: Callable[[], object] | None = callback
        self.loop = running_loop()

    def cancel(self) -> None:
        if self._callback is not None:
            self._callback = None
            self._clock.cancelled()

    @property
    def armed(self) -> bool:
        """Whether it was neither called nor cancelled."""
        return self._callback is not None

    def fire(self) -> None:
        """In its loop."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class FakeClock:
    """A `Clock` of `asynclock.stores`. All event loops and threads may share it. Times are in seconds."""

    def __init__(self) -> None:
        self._now = _START
        self._timers: list[tuple[float, int, FakeTimer]] = []
        self._numbers = count()
        self._loops: set[asyncio.AbstractEventLoop] = set()  # that have set a timer
        self._soon: set[FakeTimer] = set()  # due now: their loops call them in the next turn
        self._dead = 0  # timers in the heap that were cancelled
        self._guard = threading.RLock()
        self._last: Future[None] | None = None  # ends with the last movement that was asked for
        self._jumpers: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}
        self._pause: float | None = None
        self._may_pass = _START  # until then time passes by itself
        self._joined: FakeClock | None = None  # the clock in place of this one
        self._ahead = 0.0  # of that clock, in seconds

    def __repr__(self) -> str:
        return f"<FakeClock at {self.now() - _START:g} s>"

    def now(self) -> float:
        return self._joined.now() + self._ahead if self._joined else self._now

    def wall(self) -> float:
        return self.now() + _EPOCH

    def call_at(self, when: float, callback: Callable[[], object]) -> FakeTimer:
        if self._joined:
            return self._joined.call_at(when - self._ahead, callback)
        timer = FakeTimer(self, callback)
        with self._guard:
            self._loops.add(timer.loop)
            if when <= self._now:
                self._soon.add(timer)
                timer.loop.call_soon(self._fire, timer, context=Context())
                return timer
            heapq.heappush(self._timers, (when, next(self._numbers), timer))
        if when <= self._limit:
            self._jump_soon(timer.loop)
        return timer

    def _fire(self, timer: FakeTimer) -> None:
        self._soon.discard(timer)
        timer.fire()

    def cancelled(self) -> None:
        """One of its timers was cancelled."""
        self._dead += 1
        if self._dead > 64 and self._dead > len(self._timers) / 2:
            with self._guard:
                self._timers = [each for each in self._timers if each[2].armed]
                heapq.heapify(self._timers)
                self._dead = 0

    @property
    def root(self) -> FakeClock:
        """The clock in place of this one; itself, if there is none."""
        return self._joined.root if self._joined else self

    def join(self, other: FakeClock) -> None:
        """From now on this clock is the other one: the stores of one client have one time."""
        if self.root is other.root:
            return
        if self._joined:
            self._joined.join(other)
            return
        with self._guard:
            timers = [(when - self._now, timer) for when, _, timer in sorted(self._timers)]
            self._ahead = self._now - other.root.now()
            self._timers, self._joined = [], other.root
        other.root.take_over(timers, self._pause)

    def take_over(self, timers: list[tuple[float, FakeTimer]], pause: float | None) -> None:
        """Those of a clock that joins this one, each with the seconds that are left."""
        with self._guard:
            for left, timer in timers:
                heapq.heappush(self._timers, (self._now + left, next(self._numbers), timer))
                self._loops.add(timer.loop)
        if self._pause is None:
            self.autojump(pause)

    # -- moving --------------------------------------------------------------------------------------------------

    async def advance(self, seconds: float) -> None:
        """Move time by so many seconds. Movements that are asked for at the same time follow each other. If the task is
        cancelled meanwhile, it learns so at the end."""
        if self._joined:
            await self._joined.advance(seconds)
            return
        task, cancelled = asyncio.current_task(), None
        with self._guard:
            before, ended = self._last, Future[None]()
            self._last = ended
        # At the end of the task, and not in `_move`: a task that is cancelled before its first step never runs that.
        moving = own_task(self._move(seconds, before), "asynclock advance", lambda _: ended.set_result(None))
        if task is not None:
            _movers.add(task)
        try:
            while not moving.done():
                try:
                    await asyncio.wait({moving})
                except asyncio.CancelledError as error:
                    cancelled = error
        finally:
            if task is not None:
                _movers.discard(task)
        moving.result()
        if cancelled is not None:
            raise cancelled

    async def _move(self, seconds: float, before: Future[None] | None) -> None:
        if before is not None:
            await _end_of(before)
        end = self._now + seconds
        await self._settled_everywhere()
        while not self._joined and await self._step(end):
            pass
        if self._joined:  # a client was first used meanwhile; `_now` is when
            await self._joined.advance(end - self._now)
            return
        self._now = max(self._now, end)
        await self._settled_everywhere()

    async def _step(self, end: float) -> bool:
        """Go to the next moment until `end` at which something is due, and let it happen. False: nothing is due."""
        due = self._take_due(end)
        here = running_loop()
        for timer in due:
            if timer.loop is here:
                here.call_soon(timer.fire, context=Context())
            else:
                with suppress(RuntimeError):  # it was closed meanwhile
                    timer.loop.call_soon_threadsafe(timer.fire, context=Context())
        await self._settled_everywhere()
        return bool(due)

    def _take_due(self, end: float) -> list[FakeTimer]:
        """The timers of the next moment, which is now from here on."""
        due = list[FakeTimer]()
        with self._guard:
            while self._timers and self._timers[0][0] <= (self._now if due else end):
                when, _, timer = heapq.heappop(self._timers)
                if not timer.armed:
                    self._dead -= 1
                elif not timer.loop.is_closed():
                    self._now = max(self._now, when)
                    due.append(timer)
        return due

    async def _settled(self) -> None:
        """Return once the tasks of this loop have run as far as they can."""
        loop = running_loop()
        if (task := asyncio.current_task()) is not None:
            _movers.add(task)
        for _ in range(_MOST // _TURNS):
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if not any(each.loop is loop for each in self._soon.copy()) and not any(map(_can_run, asyncio.all_tasks())):
                return

    async def _settled_everywhere(self) -> None:
        """The same in all loops that use this clock. A task of one loop may wake a task of another without a timer. So
        all of them are asked in rounds, until a round has changed nothing."""
        here, before = running_loop(), None
        await self._settled()
        with self._guard:
            self._loops = {each for each in self._loops if not each.is_closed()}
            others = self._loops - {here}
        for _ in range(_ROUNDS if others else 0):
            found = {each: waits for each in others if (waits := await self._waits_in(each)) is not None}
            now = found, await self._waits()
            if now == before:
                return
            before, others = now, set(found)

    async def _waits(self) -> _Waits:
        """What each task of this loop waits for, once none can run."""
        await self._settled()
        return {each: getattr(each, "_fut_waiter", None) for each in asyncio.all_tasks() if each not in _movers}

    async def _waits_in(self, loop: asyncio.AbstractEventLoop) -> _Waits | None:
        """The same in another loop. None: it does not run, or is busy."""
        waits = self._waits()
        if not loop.is_running():
            waits.close()
            return None
        try:
            running = asyncio.run_coroutine_threadsafe(waits, loop)
        except RuntimeError:  # it was closed meanwhile
            waits.close()
            return None
        found = asyncio.wrap_future(running)
        await asyncio.wait({found}, timeout=_FOREIGN)
        return found.result() if found.done() and not found.cancelled() else None

    @property
    def stands_still(self) -> bool:
        """Whether nobody moves it now, and it does not move by itself."""
        if self._joined:
            return self._joined.stands_still
        return self._pause is None and (self._last is None or self._last.done())

    # -- time that passes by itself ------------------------------------------------------------------------------

    def autojump(self, pause: float | None) -> None:
        """Once nothing has run for `pause` seconds of real time, go to the next moment at which something is due. None:
        time stands still but for `advance`."""
        if self._joined:
            self._joined.autojump(pause)
            return
        self._pause = pause
        self._jump_everywhere()

    def let_pass(self, seconds: float) -> None:
        """Something has happened for which clients wait, and they take short pauses with jitter before they ask: so
        much time may pass by itself, for timers that are due by then."""
        if self._joined:
            self._joined.let_pass(seconds)
            return
        self._may_pass = max(self._may_pass, self._now + seconds)
        self._jump_everywhere()

    @property
    def _limit(self) -> float:
        """Until when time passes by itself."""
        return self._may_pass if self._pause is None else math.inf

    def _jump_everywhere(self) -> None:
        with self._guard:
            loops = {timer.loop for when, _, timer in self._timers if when <= self._limit and timer.armed}
        for loop in loops:
            with suppress(RuntimeError):  # it was closed
                loop.call_soon_threadsafe(self._jump_soon, loop, context=Context())

    def _jump_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if (running := self._jumpers.get(loop)) is None or running.done():
            self._jumpers = {each: task for each, task in self._jumpers.items() if not each.is_closed()}
            self._jumpers[loop] = own_task(self._jump(loop), "asynclock autojump")

    async def _jump(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._is_due(loop, self._limit):
            before = await self._waits()
            if self._pause:
                await asyncio.sleep(self._pause)
            if self._last is not None and not self._last.done():
                await _end_of(self._last)
            elif await self._waits() == before:
                await self._step(self._limit)

    def _is_due(self, loop: asyncio.AbstractEventLoop, limit: float) -> bool:
        with self._guard:
            return any(when <= limit and timer.loop is loop and timer.armed for when, _, timer in self._timers)
