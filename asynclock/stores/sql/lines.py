"""Connections to the database, as the store uses them: statements with named parameters, and short transactions.

    CoreLine      any driver, through SQLAlchemy
    AsyncpgLine   asyncpg itself, below SQLAlchemy: a statement costs the client a third
    AsyncmyLine   asyncmy itself, for an engine of our own

A line is in autocommit mode: transactions begin and end by statements.
"""

from __future__ import annotations

import contextlib
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import text

from asynclock.stores.sql.limits import CLOSING, cut, in_background, limited

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import TextClause
    from sqlalchemy.ext.asyncio import AsyncConnection

    from asynclock.stores.sql.files import OpenFile

_PARAMETER = re.compile(r"(?<![:\w]):(\w+)")
_NOTHING: dict[str, Any] = {}


class Line(Protocol):
    """One connection. A statement is text with parameters such as :name."""

    async def fetch(self, sql: str, params: Mapping[str, Any] = _NOTHING) -> Sequence[Any]:
        """The rows of a statement; () if it has none."""

    async def run(self, sql: str) -> None:
        """One or several statements without parameters, separated by semicolons."""

    @property
    def file(self) -> OpenFile | None:
        """Of SQLite."""

    @property
    def is_closed(self) -> bool:
        """Whether it is known to be closed."""

    async def give_back(self) -> None:
        """To the pool of SQLAlchemy. No transaction is open. Raises the error of a connection that is broken."""

    def abandon(self) -> None:
        """Close it at once: its state is unknown. Waits for nothing, and never raises."""


class _EngineLine:
    """A connection of SQLAlchemy, and the connection of the driver in it."""

    is_closed = False  # not known

    def __init__(self, connection: AsyncConnection, driver: Any, file: OpenFile | None = None) -> None:
        self._connection = connection
        self.driver = driver
        self.file = file

    async def run(self, sql: str) -> None:
        raise NotImplementedError

    async def give_back(self) -> None:
        await limited(self._give_back(), CLOSING, cut=self._cut)

    async def _give_back(self) -> None:
        await self.run("SELECT 1")  # SQLAlchemy logs an error for each broken connection that it gets back
        await self._connection.close()

    def abandon(self) -> None:
        self._cut()
        in_background(closed(self._connection))

    def _cut(self) -> None:
        cut(self.driver)


class CoreLine(_EngineLine):
    """See the module. A driver may wait for the server although it was cancelled, so each statement has a task."""

    async def fetch(self, sql: str, params: Mapping[str, Any] = _NOTHING) -> Sequence[Any]:
        result = await limited(self._connection.execute(_clause(sql), dict(params)), None, cut=self._cut)
        return result.all() if result.returns_rows else ()

    async def run(self, sql: str) -> None:
        for each in sql.split(";"):
            await limited(self._connection.exec_driver_sql(each), None, cut=self._cut)


class AsyncmyLine(_EngineLine):
    """See the module. `driver` is the connection of asyncmy in `connection`. The session is set up once, so that a
    transaction begins with one statement."""

    async def fetch(self, sql: str, params: Mapping[str, Any] = _NOTHING) -> Sequence[Any]:
        compiled, names = _formatted(sql)
        async with self.driver.cursor() as cursor:
            await cursor.execute(compiled, [params[name] for name in names])
            return [] if cursor.description is None else await cursor.fetchall()

    async def run(self, sql: str) -> None:
        for each in sql.split(";"):
            if "ISOLATION" not in each:  # the session has it
                await self.driver.query(each)


class AsyncpgLine(_EngineLine):
    """See the module. `driver` is the connection of asyncpg in `connection`."""

    @property
    def is_closed(self) -> bool:  # type: ignore[override]
        return bool(self.driver.is_closed())

    async def fetch(self, sql: str, params: Mapping[str, Any] = _NOTHING) -> Sequence[Any]:
        compiled, names = _numbered(sql)
        rows: Sequence[Any] = await self.driver.fetch(compiled, *[params[name] for name in names])
        return rows

    async def run(self, sql: str) -> None:
        await self.driver.execute(sql)


async def closed(connection: AsyncConnection) -> None:
    """Close a connection that nothing uses any more; it does not go back to its pool. Ends within two of CLOSING, and
    never raises."""
    with contextlib.suppress(Exception):  # it is closed already, or half open
        await limited(connection.invalidate(), CLOSING)
    with contextlib.suppress(Exception):
        await limited(connection.close(), CLOSING)


@lru_cache(maxsize=256)
def _clause(sql: str) -> TextClause:
    return text(sql)


@lru_cache(maxsize=256)
def _formatted(sql: str) -> tuple[str, tuple[str, ...]]:
    """The statement with %s, and the names of these parameters in their order."""
    return _PARAMETER.sub("%s", sql.replace("%", "%%")), tuple(_PARAMETER.findall(sql))


@lru_cache(maxsize=256)
def _numbered(sql: str) -> tuple[str, tuple[str, ...]]:
    """The statement with $1, $2, ..., and the names of these parameters."""
    names: list[str] = []

    def number(found: re.Match[str]) -> str:
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}"

    return _PARAMETER.sub(number, sql), tuple(names)
