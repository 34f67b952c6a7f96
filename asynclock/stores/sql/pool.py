"""The connections of one event loop for transactions."""

from __future__ import annotations

import asyncio
import contextlib
import math
import weakref
from collections import deque
from contextlib import asynccontextmanager, nullcontext
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from asynclock._clock import reading_time
from asynclock._loop import own_task
from asynclock.stores.sql.driven import Driven
from asynclock.stores.sql.errors import Meaning, is_crowded, meaning, remedied
from asynclock.stores.sql.limits import CLOSING, LIMIT, STOPPING, ending_at, in_background, rest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence

    from asynclock.stores.sql.lines import Line

_Result = TypeVar("_Result")

_BEGIN = f"BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = {int(LIMIT + 1) * 1000}"

_LINGERING = 60.0
"""Seconds for which a connection counts whose statement the server did not end: it may run on there."""

_KEPT = 2.0
"""Seconds for which an idle connection stays open, or out of the pool of a user's engine. Of our own engine the last
one stays open for longer: others may need the rest."""

_RETURNING = 0.6
"""Seconds for which a close waits until an engine of the user has its connections back."""

_PAUSES = (1.0, 30.0)
"""Seconds without an attempt after a further connection did not come: at first and at most; doubled each time."""

_TIGHT = 60.0
"""Seconds for which connections count as few after one did not come. Then each of them but one is closed _KEPT seconds
after it was made, also where it is busy: a program that has none yet gets the next one."""


class Overdue(TimeoutError):
    """The time of a use is over. `ended`: the server has confirmed that no statement of it runs on."""

    def __init__(self, *, ended: bool) -> None:
        super().__init__("its time is over")
        self.ended = ended


class Source(Protocol):
    """Where connections come from. `own`: nobody else uses it, so the last connection stays open."""

    own: bool

    async def connect(self, *, further: bool = False) -> Line:
        """A new one, or one of a pool. `further`: there are others, so it has half of the time. Raises the error of the
        database."""

    async def answers(self, line: Line) -> bool:
        """Whether a line that was idle for long still works. Never raises."""

    @property
    def shortage(self) -> Exception | None:
        """Why there is no further one now; None: unknown."""

    async def aclose(self) -> None:
        """All connections were given back. Ends within a second, whatever the server does; within LIMIT, if a file is
        slow."""

    def desert(self) -> None:
        """The event loop is closed: end all connections without it."""


class _Use:
    """One use of a line without a task."""

    driven: Driven[Any]

    def __init__(self, line: Line, until: float, done: Callable[[Any, Exception | None], object]) -> None:
        self.line = line
        self.until = until  # on the clock of the loop
        self.done = done


class Pool:
    """The connections of one event loop for transactions. A line that was used a moment ago is used again without
    asking SQLAlchemy's pool, which sends statements of its own when it checks connections in and out.

    Ops need one line. Further ones only make them faster, so no op waits for a further one: it is made in the
    background, and the line that is free first serves the op. A pooler, a server or an engine may have few."""

    def __init__(self, source: Source, *, size: int, pooler: bool) -> None:
        self.source = source
        self.pooler = pooler  # one may be between: then no session is set up
        self._size = size
        self._room = asyncio.Semaphore(size)
        self._waits = asyncio.Semaphore(max(1, size // 2))
        self._stopping: set[Line] = set()
        self._withheld = 0  # places
        self._lingering: deque[float] = deque()  # when connections were closed whose statement may run on
        self._idle: deque[tuple[Line, float]] = deque()
        self._returning: set[Line] = set()  # to the pool of SQLAlchemy
        self._uses: dict[_Use, None] = {}  # without a task, in the order in which they began
        self._watch: asyncio.TimerHandle | None = None  # for those
        self._looks_at = math.inf  # when that timer fires
        self._blocked_at = -math.inf  # when it last fired late
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._out = 0  # lines that are in use
        self._waiting: deque[asyncio.Future[Line]] = deque()  # for a line
        self._attempts: set[asyncio.Task[Line]] = set()  # connects under way
        self._made: weakref.WeakKeyDictionary[Line, float] = weakref.WeakKeyDictionary()  # when each line came
        self._pause = 0.0  # after the last attempt to have a further one; 0: it came
        self._retry: asyncio.TimerHandle | None = None  # while that pause lasts
        self._tight_until = -math.inf

    @asynccontextmanager
    async def line(self, until: float | None = None, *, waits: bool = False) -> AsyncIterator[Line]:
        """A connection for one use, until that time of the event loop, and for LIMIT seconds at most. `waits`: for a
        lock that others have; not all connections may do that at the same time. If the block raises, the connection is
        closed: catch what leaves it intact inside. Raises Overdue."""
        latest = asyncio.get_running_loop().time() + LIMIT
        ending: asyncio.Task[object] | None = None
        used = False
        try:
            until = latest if until is None else min(until, latest)
            async with ending_at(until) as limit, self._waits if waits else nullcontext():
                line = await self._acquired()
                used = True
                try:
                    yield line
                except asyncio.CancelledError:
                    ending = in_background(self._ended(line))
                    if limit.expired():  # what follows this use, as an undo, must not overtake it
                        await asyncio.wait({ending}, timeout=2 * STOPPING)
                    raise
                except BaseException:  # the server has answered, or is gone
                    line.abandon()
                    self._give_up()
                    self._room.release()
                    raise
                self._out -= 1
                self._pass_on(line)
                self._room.release()
        except TimeoutError as error:
            if not limit.expired():  # that of a connect
                raise
            raise Overdue(ended=not used or (ending is not None and _confirmed(ending))) from error

    async def used(self, use: Callable[[Line], Awaitable[_Result]]) -> _Result:
        """Use a line; again with another one, if an idle connection was closed meanwhile. Raises Overdue, or the error
        of the use."""
        try:
            async with self.line() as line:
                return await use(line)
        except Exception as error:
            if meaning(error) is not Meaning.LOST or isinstance(error, TimeoutError):
                raise
        self.drop_idle()
        async with self.line() as line:
            return await use(line)

    def begin(
        self, work: Callable[[Line], Coroutine[Any, Any, _Result]], done: Callable[[Any, Exception | None], object]
    ) -> bool:
        """Use a line without a task, if there is one that was used a moment ago and needs none. `done` is called in a
        later turn of the loop: with what `work` returned, or with its error. Then the connection is closed, as in
        `line`; the same limit holds. False: nothing was begun."""
        loop = asyncio.get_running_loop()
        if not self._idle or self._idle[-1][1] <= loop.time() or not self._idle[-1][0].needs_no_task:
            return False
        if (line := self.take()) is None:
            return False
        use = _Use(line, loop.time() + LIMIT, done)
        use.driven = Driven(work(line), partial(self._use_ended, use))
        self._uses[use] = None
        if self._watch is None:
            self._look_at(use.until)
        use.driven.begin()
        return True

    def _use_ended(self, use: _Use, result: object, error: BaseException | None) -> None:
        if use not in self._uses:
            return  # it was overdue
        del self._uses[use]
        if error is None:
            self.put_back(use.line)
        else:
            self.give_up(use.line)
        use.done(result, error if error is None or isinstance(error, Exception) else ConnectionError("cancelled"))

    def _look_at(self, when: float) -> None:
        self._looks_at = when
        self._watch = asyncio.get_running_loop().call_at(when, self._look, context=Context())

    def _look(self) -> None:
        """End the uses that are overdue. After the loop was blocked it first reads what has come: then only uses that
        were due at the last such look are overdue. As `Deadlines`, but all uses have one limit: the first is the
        oldest, and no look is at all of them."""
        now, self._watch = asyncio.get_running_loop().time(), None
        due = now
        if reading := reading_time(now - self._looks_at):
            due, self._blocked_at = self._blocked_at, now
        while self._uses and (use := next(iter(self._uses))).until <= due:
            in_background(self._fail_overdue(use, self._drop(use)))
        if self._uses:
            self._look_at(max(now + reading, next(iter(self._uses)).until))

    def _drop(self, use: _Use) -> asyncio.Task[object]:
        """End it now, as `line` does, without a word to its owner. The task has the result of `_ended`."""
        del self._uses[use]
        use.driven.cancel()
        return in_background(self._ended(use.line))

    async def _fail_overdue(self, use: _Use, ending: asyncio.Task[object]) -> None:
        await asyncio.wait({ending}, timeout=2 * STOPPING)  # what follows this use must not overtake it
        use.done(None, Overdue(ended=_confirmed(ending)))

    def take(self) -> Line | None:
        """A line that is idle, if nobody waits for one. Give it back by `put_back` or `give_up`. Without the limits,
        timers and tasks of `line`, which cost as much as a transaction of a local file."""
        if self._room.locked() or not self._idle or self._idle[-1][0].is_closed:
            return None
        acquiring = self._room.acquire()
        with contextlib.suppress(StopIteration):
            acquiring.send(None)  # there is room: it waits for nothing
        line, _ = self._idle.pop()
        self._out += 1
        return line

    async def taken(self) -> Line:
        """As `take`, in the order of those who wait; a new line, if none is idle. Raises TimeoutError, or the error of
        the database."""
        async with asyncio.timeout(LIMIT):
            return await self._acquired()

    def put_back(self, line: Line) -> None:
        """A line of `take` or `taken`, as it was."""
        self._out -= 1
        self._pass_on(line)
        self._room.release()

    def give_up(self, line: Line) -> None:
        """A line of `take` or `taken`, whose state is unknown."""
        line.abandon()
        self._give_up()
        self._room.release()

    async def _acquired(self) -> Line:
        """A place, and the line for it, in the order of those who wait."""
        await self._room.acquire()
        try:
            line = await self._next()
        except BaseException:
            self._room.release()
            raise
        return line

    async def _ended(self, line: Line) -> bool | None:
        """End a use in the middle of a statement; see `Line.stopped`. Its place is taken until then."""
        stopped: bool | None = False
        self._stopping.add(line)
        try:
            stopped = await line.stopped()
        finally:
            self._stopping.discard(line)
            if stopped and not line.is_closed:  # it is rolled back, and as good as new
                self._out -= 1
                self._pass_on(line)
                self._room.release()
            else:
                line.abandon()
                self._give_up()
                self._leave(runs_on=stopped is False)
        return stopped

    def _give_up(self) -> None:
        """A line was closed in use: there may be room for another one."""
        self._out -= 1
        self._connect()

    def _leave(self, *, runs_on: bool) -> None:
        """A place becomes free. `runs_on`: its statement may run on at the server. Then a new connection is needed
        nevertheless, for it may be the network. After `size` such statements in _LINGERING the places are withheld, but
        for one: the server may be well again."""
        loop = asyncio.get_running_loop()
        while self._lingering and self._lingering[0] <= loop.time() - _LINGERING:
            self._lingering.popleft()
        if runs_on and len(self._lingering) >= self._size and self._withheld < self._size - 1:
            self._withheld += 1
            loop.call_later(_LINGERING, self._restore)
            return
        if runs_on:
            self._lingering.append(loop.time())
        self._room.release()

    def _restore(self) -> None:
        self._withheld -= 1
        self._room.release()

    async def _next(self) -> Line:
        """An idle line; else the one that is free first: one that is in use now, or a new one."""
        while self._idle:
            line, until = self._idle.pop()
            self._out += 1
            try:
                fresh = until > asyncio.get_running_loop().time()
                if not line.is_closed and (fresh or await self.source.answers(line)):
                    return line
            except BaseException:
                line.abandon()
                self._give_up()
                raise
            line.abandon()
            self._out -= 1
        waiter: asyncio.Future[Line] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._connect()
        try:
            return await waiter
        except BaseException:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.cancelled() and waiter.exception() is None:
                self._out -= 1
                self._pass_on(waiter.result())
            raise

    def _connect(self) -> None:
        """Connect, as far as ops wait for a line and there is room for more."""
        if self._closed:
            self._fail(ConnectionError("closed"))
        waiting = sum(not each.done() for each in self._waiting)
        if not self._out and not self._idle:  # none can do anything before the first line has come
            if waiting and not self._attempts:
                self._begin_attempt(further=False)
            return
        room = self._size - self._out - len(self._idle)
        if self._pause:  # the last one did not come
            room = min(room, 1)
        while self._retry is None and len(self._attempts) < min(waiting, room):
            self._begin_attempt(further=True)

    @property
    def shortage(self) -> str:
        """Why those that wait get no line; "": unknown, or nobody waits."""
        return remedied(shortage) if self._waiting and (shortage := self.source.shortage) is not None else ""

    def _begin_attempt(self, *, further: bool) -> None:
        connecting = self.source.connect(further=further)
        self._attempts.add(own_task(connecting, "asynclock connects", partial(self._attempted, further=further)))

    def _attempted(self, task: asyncio.Task[Line], *, further: bool) -> None:
        self._attempts.discard(task)
        error = ConnectionError("closed") if task.cancelled() else task.exception()
        if error is None:
            self._pause = 0.0
            self._made[task.result()] = task.get_loop().time()
            self._pass_on(task.result(), new=True)
        elif further:
            self._has_few()
        else:
            self._fail(error)
        self._connect()

    def _fail(self, error: BaseException) -> None:
        """Those that wait get no line."""
        waiting, self._waiting = self._waiting, deque()
        for waiter in waiting:
            if not waiter.done():
                waiter.set_exception(error)

    def _has_few(self) -> None:
        """A further line did not come: the next attempt is later."""
        loop = asyncio.get_running_loop()
        self._tight_until = loop.time() + _TIGHT
        if self._retry is None:  # else it is that of another attempt, which was under way at the same time
            self._pause = min(max(2 * self._pause, _PAUSES[0]), _PAUSES[1])
            self._wait(self._pause)

    def _wait(self, seconds: float) -> None:
        """Begin no attempt for that time."""
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(seconds, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self._connect()

    async def has_room(self) -> bool:
        """Whether a further connection comes now. It is closed at once. If it does not, the lines are given up in turn,
        so that other programs get theirs. Raises the error of the database."""
        try:
            line = await self.source.connect(further=True)
        except Exception as error:
            if not is_crowded(error):
                raise
            self._has_few()
            return False
        in_background(line.give_back())
        return True

    def _pass_on(self, line: Line, *, new: bool = False) -> None:
        """A line is not in use any more, or new."""
        if not new and self._is_old(line):
            in_background(self._return(line))
            return
        if self._is_due(line):
            in_background(self._return(line))
            self._wait(_PAUSES[0])  # for others
            return
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._out += 1  # now, and not when it wakes up: else nothing is in use meanwhile, as it seems
                waiter.set_result(line)
                return
        self._keep(line)

    def _is_due(self, line: Line) -> bool:
        """Whether it is to be closed for others: see _TIGHT."""
        now = asyncio.get_running_loop().time()
        return now < self._tight_until and bool(self._out or self._idle) and self._made.get(line, now) + _KEPT <= now

    def _is_old(self, line: Line) -> bool:
        """Whether it is to be replaced by one whose session is set up."""
        return not (self.pooler or line.is_set_up) and bool(self._out or self._idle)

    def return_old(self) -> None:
        """Give the idle lines back whose sessions are not set up. Those in use follow at the end of their use."""
        for each in [each for each in self._idle if not each[0].is_set_up]:
            self._idle.remove(each)
            self._pass_on(each[0])

    def drop_idle(self) -> None:
        """Close the idle connections: one of them was found closed."""
        idle, self._idle = self._idle, deque()
        for line, _ in idle:
            line.abandon()

    async def alone(self, line: Line, sql: str, params: Mapping[str, Any]) -> Sequence[Any]:
        """One statement that is a transaction of its own. Behind a pooler its two messages need one for certain."""
        if not self.pooler:
            return await line.fetch(sql, params)
        await line.run(_BEGIN)
        found = await line.fetch(sql, params)
        await line.run("COMMIT")
        return found

    def _keep(self, line: Line) -> None:
        loop = asyncio.get_running_loop()
        self._idle.append((line, loop.time() + _KEPT))
        if self._closed:
            self._give_back()
        elif self._timer is None:
            self._timer = loop.call_later(_KEPT, self._give_back)

    def _give_back(self) -> None:
        """Give the lines back that were not used for a while: the least recently used are at the left."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._idle and (self._closed or self._idle[0][1] <= loop.time()):
            if self.source.own and not (self._closed or self._out or len(self._idle) > 1):
                return  # the last one stays open
            line, _ = self._idle.popleft()
            in_background(self._return(line))
        if self._idle:
            self._timer = loop.call_at(self._idle[0][1], self._give_back)

    def desert(self) -> None:
        """The event loop is closed: end all connections without it."""
        for line in [*(use.line for use in self._uses), *(line for line, _ in self._idle)]:
            line.desert()
        self._uses.clear()
        self._idle.clear()
        self.source.desert()

    async def aclose(self) -> None:
        """Give all lines back."""
        self._closed = True
        for timer in (self._timer, self._retry, self._watch):
            if timer is not None:
                timer.cancel()
        for attempt in self._attempts:
            attempt.cancel()
        for use in list(self._uses):
            self._drop(use)
        self._give_back()
        await rest(CLOSING if self.source.own else _RETURNING)
        # No answer yet. Of those that return, SQLAlchemy would keep open what comes back after the end of its pool.
        for line in [*self._stopping, *self._returning]:
            line.abandon()
        await self.source.aclose()

    async def _return(self, line: Line) -> None:
        self._returning.add(line)
        try:
            await line.give_back()
        except BaseException as error:  # a connection that broke while it was idle
            line.abandon()
            if not isinstance(error, Exception):
                raise
        finally:
            self._returning.discard(line)


def _confirmed(ending: asyncio.Task[object]) -> bool:
    """Whether the server has confirmed that no statement runs on."""
    return ending.done() and not ending.cancelled() and ending.result() is True
