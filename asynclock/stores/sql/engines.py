"""The engine of a store: the user's, or one for each event loop, since an AsyncEngine belongs to one loop."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from asynclock._errors import ConfigError
from asynclock.stores.sql.dialects import DIALECTS, IDLE
from asynclock.stores.sql.lines import AsyncpgLine, CoreLine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from sqlalchemy import URL

    from asynclock.stores.sql.lines import Line

DRIVERS = {
    "postgresql": "postgresql+asyncpg",
    "mysql": "mysql+asyncmy",
    "mariadb": "mariadb+asyncmy",
    "sqlite": "sqlite+aiosqlite",
}
"""The driver of a url that names none."""

EXTRAS = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite"}

CONNECTIONS = 4
"""For transactions, of one event loop."""

_KEPT = 2.0
"""Seconds for which an idle connection is kept out of the pool of SQLAlchemy, which checks it in and out."""


def url_of(text: str) -> URL:
    """A checked url. Raises ConfigError."""
    try:
        url = make_url(text)
        url = url.set(drivername=DRIVERS.get(url.drivername, url.drivername))
        backend = url.get_backend_name()
    except (ArgumentError, ValueError) as error:
        raise ConfigError(f"this is not the url of a database: {error.args[0].partition(' from')[0]}") from None
    if backend not in DIALECTS:
        raise ConfigError(f"no statements for {backend}: there are {', '.join(DIALECTS)}")
    try:
        driver = url.get_dialect()
        is_async, module = driver.is_async, driver.import_dbapi
        module()
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        need = f"pip install 'asynclock[{EXTRAS[backend]}]'"
        raise ConfigError(f"{url.drivername}:// needs a driver ({error}): {need}") from None
    if not is_async:
        raise ConfigError(f"{url.drivername} is not an asyncio driver: use {DRIVERS[backend]}:// or {backend}://")
    return url


def label_of(url: URL, table: str) -> str:
    """The name of the store in messages: no user, no password, no options."""
    where = url.set(username=None, password=None, query={}, drivername=url.get_backend_name())
    shown = where.render_as_string(hide_password=True)
    return shown if table == "asynclock" else f"{shown} (table {table})"


def engine_of(url: URL, connect_timeout: float, *, pooler: bool) -> AsyncEngine:
    """An engine of our own. `pooler`: no prepared statement may outlive its transaction, because the next transaction
    may run on another connection of the server."""
    backend, driver = url.get_backend_name(), url.get_driver_name()
    options: dict[str, Any] = {"pool_size": CONNECTIONS, "max_overflow": 1}
    arguments: dict[str, Any] = {}
    if driver == "asyncpg":
        arguments = {"timeout": connect_timeout, "prepared_statement_cache_size": 0}
        arguments["prepared_statement_name_func"] = lambda: f"__asynclock_{uuid.uuid4()}__"
        if pooler:
            arguments["statement_cache_size"] = 0
    elif driver == "asyncmy":
        setting = f"SET SESSION innodb_lock_wait_timeout = {int(IDLE)}"
        arguments = {"connect_timeout": connect_timeout, "init_command": setting}
    elif backend == "sqlite":
        arguments = {"timeout": 0.0}  # it would sleep up to 100 ms; the store asks again after a shorter pause
    return create_async_engine(url, connect_args=arguments, **options)


class Pool:
    """The connections of one event loop for transactions. A line that was used a moment ago is used again without
    asking SQLAlchemy's pool, which sends statements of its own when it checks connections in and out."""

    def __init__(self, engine: AsyncEngine, connect_timeout: float, *, size: int, pooler: bool) -> None:
        self.engine = engine
        self.pooler = pooler
        self._timeout = connect_timeout
        self._room = asyncio.Semaphore(size)
        self._idle: deque[tuple[Line, float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._returning: set[asyncio.Task[None]] = set()
        self._closed = False

    @asynccontextmanager
    async def line(self) -> AsyncIterator[Line]:
        """A connection for one use. If the block raises, it is closed: catch what leaves it intact inside."""
        async with self._room:
            line = self._idle.pop()[0] if self._idle else await self.connect()
            try:
                yield line
            except BaseException:
                await line.abandon()
                raise
            self._keep(line)

    async def alone(self, line: Line, sql: str, params: Mapping[str, Any]) -> Sequence[Any]:
        """One statement that is a transaction of its own. Behind a pooler its two messages need one for certain."""
        if not self.pooler:
            return await line.fetch(sql, params)
        await line.run("BEGIN")
        found = await line.fetch(sql, params)
        await line.run("COMMIT")
        return found

    async def connect(self) -> Line:
        """A connection of SQLAlchemy's pool. Raises its error, or TimeoutError."""
        async with asyncio.timeout(self._timeout):
            connection = await self.engine.connect()
            try:
                await connection.execution_options(isolation_level="AUTOCOMMIT")
                if self.engine.dialect.driver == "asyncpg":
                    raw = await connection.get_raw_connection()
                    return AsyncpgLine(connection, raw.driver_connection)
            except BaseException:
                await connection.close()
                raise
            return CoreLine(connection)

    def _keep(self, line: Line) -> None:
        loop = asyncio.get_running_loop()
        self._idle.append((line, loop.time() + _KEPT))
        if self._timer is None:
            self._timer = loop.call_later(_KEPT, self._give_back)

    def _give_back(self) -> None:
        """Give the lines back that were not used for a while: the least recently used are at the left."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._idle and (self._closed or self._idle[0][1] <= loop.time()):
            task = loop.create_task(_given_back(self._idle.popleft()[0]))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)
        if self._idle:
            self._timer = loop.call_at(self._idle[0][1], self._give_back)

    async def aclose(self, *, dispose: bool) -> None:
        """Give all lines back. `dispose`: the engine is ours."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._give_back()
        if self._returning:
            await asyncio.wait(self._returning)
        if dispose:
            await self.engine.dispose()


async def _given_back(line: Line) -> None:
    try:
        await line.give_back()
    except (SQLAlchemyError, OSError):
        await line.abandon()
