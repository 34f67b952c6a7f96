"""The connections of one event loop for transactions."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from asynclock.stores.sql.limits import CLOSING, in_background, rest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from asynclock.stores.sql.lines import Line

LIMIT = 5.0
"""Seconds for one use of a connection: behind a network that drops packets, no answer would ever come."""

_KEPT = 2.0
"""Seconds for which an idle connection is kept out of the pool of SQLAlchemy, which checks it in and out."""


class Source(Protocol):
    """Where connections come from."""

    async def connect(self) -> Line:
        """A new one, or one of a pool. Raises the error of the database."""

    async def aclose(self) -> None:
        """All connections were given back. Ends within a second, whatever the server does."""


class Pool:
    """The connections of one event loop for transactions. A line that was used a moment ago is used again without
    asking SQLAlchemy's pool, which sends statements of its own when it checks connections in and out."""

    def __init__(self, source: Source, *, size: int, pooler: bool) -> None:
        self.source = source
        self.pooler = pooler
        self._room = asyncio.Semaphore(size)
        self._idle: deque[tuple[Line, float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @asynccontextmanager
    async def line(self) -> AsyncIterator[Line]:
        """A connection for one use, for at most LIMIT seconds. If the block raises, it is closed: catch what leaves it
        intact inside."""
        async with self._room, asyncio.timeout(LIMIT):
            line = await self._next()
            try:
                yield line
            except BaseException:
                line.abandon()
                raise
            self._keep(line)

    async def _next(self) -> Line:
        while self._idle:
            line, _ = self._idle.pop()
            if not line.is_closed:
                return line
            line.abandon()
        return await self.source.connect()

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
            in_background(_given_back(self._idle.popleft()[0]))
        if self._idle:
            self._timer = loop.call_at(self._idle[0][1], self._give_back)

    async def aclose(self) -> None:
        """Give all lines back."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._give_back()
        await rest(CLOSING)
        await self.source.aclose()


async def _given_back(line: Line) -> None:
    try:
        await line.give_back()
    except BaseException as error:  # a connection that broke while it was idle
        line.abandon()
        if not isinstance(error, Exception):
            raise
