"""Virtual time: the true time of a world, the clocks that differ from it, and the event loop of one client."""

from __future__ import annotations

import math
from asyncio import CancelledError
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

WALL = 1_700_000_000.0
"""Unix time at the true time 0."""

_TICK = 1e-9
"""A timer comes so much late, in seconds, so that a rounding does not make it early."""

_MOST_CALLS = 100_000
"""In one turn of a client. More than these never end."""


class Event:
    """Something that happens at a true time."""

    __slots__ = ("args", "call", "when")

    def __init__(self, when: float, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.when = when
        self.call: Callable[..., object] | None = call
        self.args = args

    def cancel(self) -> None:
        self.call, self.args = None, ()


class Schedule:
    """The true time, and what happens next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., object], *args: Any) -> Event:
        """Events of one moment happen in the order in which they were made."""
        self._count += 1
        when = max(when, self.now)
        event = Event(when, call, args)
        heappush(self._events, (when, self._count, event))
        return event

    @property
    def next_at(self) -> float:
        """When the next event happens; math.inf: never."""
        while self._events and self._events[0][2].call is None:
            heappop(self._events)
        return self._events[0][0] if self._events else math.inf

    def step(self) -> None:
        """Let the next event happen."""
        self.now, _, event = heappop(self._events)
        if event.call is not None:
            event.call(*event.args)

    def run(self, until: float, stop: Callable[[], bool]) -> None:
        """Let happen what happens until that time, or until `stop` is true."""
        events = self._events
        while events and events[0][0] <= until and not stop():
            when, _, event = heappop(events)
            if event.call is not None:
                self.now = when
                event.call(*event.args)
        if not stop():
            self.now = max(self.now, until)


class Clock:
    """The clock of one client: it runs at a speed of its own. Its wall clock is kept right by NTP, but for an offset,
    and may be stepped. Timers of the machine have another instance than those of the program and of the nodes, so that
    those of the machine can be counted."""

    def __init__(self, loop: Loop, rate: float = 1.0, offset: float = 0.0, wall_offset: float = 0.0) -> None:
        self._loop = loop
        self._schedule = loop.schedule
        self.rate = rate
        self._offset = offset
        self._wall = [wall_offset]
        self.timers: dict[Timer, None] = {}  # that are neither cancelled nor over

    def beside(self) -> Clock:
        """The same time, with other timers."""
        other = Clock(self._loop, self.rate, self._offset)
        other._wall = self._wall
        return other

    def now(self) -> float:
        return self._offset + self.rate * self._schedule.now

    def wall(self) -> float:
        return WALL + self._schedule.now + self._wall[0]

    def step(self, seconds: float) -> None:
        """Of the wall clock alone."""
        self._wall[0] += seconds

    def true_time(self, when: float) -> float:
        """The true time at which this clock shows `when`."""
        return (when - self._offset) / self.rate

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = Timer(self, callback)
        timer.event = self._schedule.at(self.true_time(when) + _TICK, self._loop.timer_due, timer)
        self.timers[timer] = None
        return timer


class Timer:
    """A timer of one client."""

    __slots__ = ("_callback", "_clock", "event")

    event: Event

    def __init__(self, clock: Clock, callback: Callable[[], object]) -> None:
        self._clock = clock
        self._callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.event.cancel()
        self._end()

    def fire(self) -> None:
        callback = self._end()
        if callback is not None:
            callback()

    def _end(self) -> Callable[[], object] | None:
        self._clock.timers.pop(self, None)
        callback, self._callback = self._callback, None
        return callback


class Loop:
    """The event loop of one client. It runs one turn for each event, unless it is stopped: then the events wait, and
    the next turn has all of them. `timers_first`: as uvloop does; asyncio reads its sockets first."""

    def __init__(self, schedule: Schedule, fault: Callable[[BaseException], object], *, timers_first: bool) -> None:
        self.schedule = schedule
        self.dead = False
        self.runs_since = 0.0  # the true time since which it was not stopped; math.inf: it is
        self._stops = 0
        self._fault = fault
        self._timers_first = timers_first
        self._ready: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._messages: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._timers: list[Timer] = []

    @property
    def is_stopped(self) -> bool:
        return self._stops > 0

    def later(self, call: Callable[..., object], *args: object) -> None:
        """Call it in the next turn."""
        self._ready.append((call, args))

    def call_soon_threadsafe(self, call: Callable[..., object], *args: object) -> None:
        """From a finalizer, which runs between any two steps."""
        self.schedule.at(self.schedule.now, self.post, call, *args)

    def post(self, call: Callable[..., object], *args: object) -> None:
        """An event from outside: a message, or something that the program does."""
        if self.dead:
            return
        if self._stops:
            self._messages.append((call, args))
        else:
            self._ready.append((call, args))
            self._turns()

    def timer_due(self, timer: Timer) -> None:
        if self._stops and not self.dead:
            self._timers.append(timer)
        else:
            self.post(timer.fire)

    def stop(self, seconds: float) -> None:
        """The process is stopped, or a call blocks the loop."""
        self._stops += 1
        self.runs_since = math.inf
        self.schedule.at(self.schedule.now + seconds, self._go_on)

    def _go_on(self) -> None:
        self._stops -= 1
        if self._stops or self.dead:
            return
        self.runs_since = self.schedule.now
        timers = [(timer.fire, ()) for timer in self._timers]
        both = [*timers, *self._messages] if self._timers_first else [*self._messages, *timers]
        self._timers, self._messages = [], []
        self._ready.extend(both)
        self._turns()

    def kill(self) -> None:
        """The process is gone."""
        self.dead = True
        self._ready.clear()
        self._messages.clear()
        self._timers.clear()

    def _turns(self) -> None:
        calls = 0
        while self._ready:
            call, args = self._ready.popleft()
            try:
                call(*args)
            except Exception as error:  # a flaw: nothing of the machine raises into the loop
                self._fault(error)
                return
            calls += 1
            if calls > _MOST_CALLS:
                self._fault(RuntimeError(f"a turn without an end: {call}"))
                return


class Result:
    """A future."""

    __slots__ = ("_error", "_loop", "_state", "_then")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._state = "open"
        self._error: BaseException | None = None
        self._then: Callable[[], object] | None = None

    def done(self) -> bool:
        return self._state != "open"

    def set_result(self, result: object = None, /) -> None:
        del result
        self._end("ended")

    def set_exception(self, error: BaseException, /) -> None:
        self._error = error
        self._end("failed")

    def cancel(self) -> bool:
        if self._state != "open":
            return False
        self._end("cancelled")
        return True

    def cancelled(self) -> bool:
        return self._state == "cancelled"

    def exception(self) -> BaseException | None:
        return self._error

    def then(self, call: Callable[[], object] | None) -> None:
        """Call it in a turn after the end."""
        self._then = call

    def _end(self, state: str) -> None:
        assert self._state == "open"  # noqa: S101 - as a future of asyncio, which raises
        self._state = state
        if self._then is not None:
            self._loop.later(self._then)

    def __await__(self) -> Generator[Any, Any, None]:
        if self._state == "open":
            yield self
        if self._state == "cancelled":
            raise CancelledError
        if self._error is not None:
            error, self._error = self._error, None
            raise error


class Task:
    """Runs a coroutine that awaits only `Result`s, as asyncio runs one."""

    def __init__(
        self, loop: Loop, work: Callable[[Task], Coroutine[Any, Any, None]], ended: Callable[[], object]
    ) -> None:
        self._work: Callable[[Task], Coroutine[Any, Any, None]] | None = work  # until the first step
        self._coroutine: Coroutine[Any, Any, None] | None = None
        self._ended = ended
        self._waits: Result | None = None
        self._must_cancel = False
        self._was_cancelled = False
        loop.later(self._step)

    def done(self) -> bool:
        return self._coroutine is None and self._work is None

    def cancel(self) -> None:
        """Cancel it where it waits. A task whose wait has just ended is cancelled at its next step."""
        self._was_cancelled = True
        if not self.done() and (self._waits is None or not self._waits.cancel()):
            self._must_cancel = True

    def drop(self) -> None:
        """The process is gone."""
        coroutine, self._work, self._coroutine, self._waits = self._coroutine, None, None, None
        if coroutine is not None:
            coroutine.close()

    def _step(self) -> None:
        if self._work is not None:
            self._coroutine, self._work = self._work(self), None
        if self._coroutine is None:
            return
        cancel, self._must_cancel, self._waits = self._must_cancel, False, None
        try:
            waits = self._coroutine.throw(CancelledError()) if cancel else self._coroutine.send(None)
        except (StopIteration, CancelledError) as end:
            self._coroutine = None
            self._ended()
            if isinstance(end, CancelledError) and not self._was_cancelled:
                raise RuntimeError("a task that nobody cancelled was cancelled") from end
        else:
            self._waits = waits
            waits.then(self._step)
