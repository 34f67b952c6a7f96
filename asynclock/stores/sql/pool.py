"""The connections of one event loop for transactions."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from asynclock.stores.sql.errors import is_crowded
from asynclock.stores.sql.limits import CLOSING, STOPPING, in_background, rest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from asynclock.stores.sql.lines import Line

LIMIT = 5.0
"""Seconds for one use of a connection: behind a network that drops packets, no answer would ever come."""

_LINGERING = 60.0
"""Seconds for which a connection counts whose statement the server did not end: it may run on there."""

_KEPT = 2.0
"""Seconds for which an idle connection is kept out of the pool of SQLAlchemy, which checks it in and out."""

_CROWDED = 1.0
"""Seconds for which no connect is tried after the server had no room for one more, while there is another line."""


class Overdue(TimeoutError):
    """The time of a use is over. `ended`: the server has confirmed that no statement of it runs on."""

    def __init__(self, *, ended: bool) -> None:
        super().__init__("its time is over")
        self.ended = ended


class Source(Protocol):
    """Where connections come from."""

    async def connect(self) -> Line:
        """A new one, or one of a pool. Raises the error of the database."""

    async def aclose(self) -> None:
        """All connections were given back. Ends within a second, whatever the server does."""

    def desert(self) -> None:
        """The event loop is closed: end all connections without it."""


class Pool:
    """The connections of one event loop for transactions. A line that was used a moment ago is used again without
    asking SQLAlchemy's pool, which sends statements of its own when it checks connections in and out."""

    def __init__(self, source: Source, *, size: int, pooler: bool) -> None:
        self.source = source
        self.pooler = pooler
        self._size = size
        self._room = asyncio.Semaphore(size)
        self._waits = asyncio.Semaphore(max(1, size // 2))
        self._stopping: set[Line] = set()
        self._withheld = 0  # places
        self._lingering: deque[float] = deque()  # when connections were closed whose statement may run on
        self._idle: deque[tuple[Line, float]] = deque()
        self._returning: set[Line] = set()  # to the pool of SQLAlchemy
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._out = 0  # lines that are in use
        self._crowded_until = -math.inf
        self._waiting: deque[asyncio.Future[Line | None]] = deque()  # for one of these; None: there may be room

    @asynccontextmanager
    async def line(self, until: float | None = None, *, waits: bool = False) -> AsyncIterator[Line]:
        """A connection for one use, until that time of the event loop, and for LIMIT seconds at most. `waits`: for a
        lock that others have; not all connections may do that at the same time. If the block raises, the connection is
        closed: catch what leaves it intact inside. Raises Overdue."""
        latest = asyncio.get_running_loop().time() + LIMIT
        ending: asyncio.Task[object] | None = None
        used = False
        try:
            async with asyncio.timeout_at(latest if until is None else min(until, latest)) as limit:
                async with self._waits if waits else nullcontext():
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
            ended = not used or (
                ending is not None and ending.done() and not ending.cancelled() and ending.result() is True
            )
            raise Overdue(ended=ended) from error

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
        self._out += 1
        return line

    async def _ended(self, line: Line) -> bool | None:
        """End a use in the middle of a statement; see `Line.stopped`. Its place is taken until then."""
        stopped: bool | None = False
        self._stopping.add(line)
        try:
            stopped = await line.stopped()
        finally:
            self._stopping.discard(line)
            line.abandon()
            self._give_up()
            self._leave(runs_on=stopped is False)
        return stopped

    def _give_up(self) -> None:
        """A line was closed in use: there may be room for another one."""
        self._out -= 1
        self._pass_on(None)

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
        """An idle line, or a new one. If the server has no room for one more, one that is in use now."""
        loop = asyncio.get_running_loop()
        while True:
            while self._idle:
                line, _ = self._idle.pop()
                if not line.is_closed:
                    return line
                line.abandon()
            if not self._out or loop.time() >= self._crowded_until:
                try:
                    return await self.source.connect()
                except Exception as error:
                    if not (is_crowded(error) and (self._out or self._idle)):
                        raise
                self._crowded_until = loop.time() + _CROWDED
                loop.call_later(_CROWDED, self._pass_on, None)  # the next one that waits tries to connect
            elif (passed_on := await self._next_in_use()) is not None:
                return passed_on

    async def _next_in_use(self) -> Line | None:
        """Wait for a line that is in use; None: it was closed instead."""
        waiter: asyncio.Future[Line | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except BaseException:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.cancelled():
                self._pass_on(waiter.result())
            raise

    def _pass_on(self, line: Line | None) -> None:
        """A line is not in use any more; None: it was closed."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(line)
                return
        if line is not None:
            self._keep(line)

    def drop_idle(self) -> None:
        """Close the idle connections: one of them was found closed."""
        idle, self._idle = self._idle, deque()
        for line, _ in idle:
            line.abandon()

    async def alone(self, line: Line, sql: str, params: Mapping[str, Any]) -> Sequence[Any]:
        """One statement that is a transaction of its own. Behind a pooler its two messages need one for certain."""
        if not self.pooler:
            return await line.fetch(sql, params)
        await line.run("BEGIN")
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
            in_background(self._return(self._idle.popleft()[0]))
        if self._idle:
            self._timer = loop.call_at(self._idle[0][1], self._give_back)

    def desert(self) -> None:
        """The event loop is closed: end all connections without it."""
        for line, _ in self._idle:
            line.desert()
        self._idle.clear()
        self.source.desert()

    async def aclose(self) -> None:
        """Give all lines back."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._give_back()
        await rest(CLOSING)
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
