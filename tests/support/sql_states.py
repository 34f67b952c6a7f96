"""What a SQLStore keeps, read without its node; and sessions of other programs at its server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from asynclock.rules.model import State
from asynclock.stores.sql import SQLStore
from asynclock.stores.sql.database import Database
from asynclock.stores.sql.dialects import SQLite
from asynclock.stores.sql.engines import url_of
from asynclock.stores.sql.machine_clock import clock_with
from asynclock.stores.sql.pool import Pool
from asynclock.stores.sql.rows import CLOCK, Row, resource_name, state_of

_threads = ThreadPoolExecutor(1)


@asynccontextmanager
async def session(url: str) -> AsyncIterator[AsyncConnection]:
    """A connection of a stranger to a MariaDB."""
    engine = create_async_engine(url.replace("mariadb:", "mariadb+asyncmy:"))
    try:
        async with engine.connect() as connection:
            yield connection
    finally:
        await engine.dispose()


@asynccontextmanager
async def administered(url: str) -> AsyncIterator[AsyncConnection]:
    """A connection to any database, which commits each statement."""
    engine = create_async_engine(url_of(url), isolation_level="AUTOCOMMIT")
    try:
        async with engine.connect() as connection:
            yield connection
    finally:
        await engine.dispose()


def sql_state(store: SQLStore, key: str) -> State:
    """The state of a key now. It is read in another thread, with a connection of its own."""
    return _threads.submit(asyncio.run, read_state(store, key)).result()


async def read_state(store: SQLStore, key: str) -> State:
    """The same, in this loop."""
    rows, now = await read_rows(store, [key])
    found = rows.get(resource_name(key))
    return State() if found is None else state_of(found).at(now)


async def read_rows(store: SQLStore, keys: list[str] | None = None) -> tuple[dict[str, Row], float]:
    """The rows of these keys (None: all), and the time of the server."""
    settings, dialect = store._settings, store._settings.dialect()
    pool = Pool(settings.new_source(5.0, pooler=True), size=1, pooler=True)
    try:
        async with pool.line() as line:
            rows = {row.resource_name: row for row in await dialect.page(line, "", 1_000_000)}
            if isinstance(dialect, SQLite):
                dialect.clock = clock_with(rows[CLOCK].expires_at or 0.0)
            now = await dialect.time(line)
    finally:
        await pool.aclose()
    wanted = None if keys is None else {resource_name(key) for key in keys}
    return {name: row for name, row in rows.items() if wanted is None or name in wanted}, now


async def change_state(store: SQLStore, key: str, **changes: Any) -> None:
    """Change a state that is there."""
    rows, _ = await read_rows(store, [key])
    await write_state(store, key, replace(state_of(rows[resource_name(key)]), **changes))


def database_of(store: SQLStore) -> Any:
    """The database, as the only event loop of the store uses it."""
    (database,) = store._databases.values()
    return database


async def listening_pid(store: SQLStore) -> int | None:
    """The process of the server behind the connection that listens, in its only event loop; None: it has none now, or
    the client uses it."""
    listening = database_of(store).push._listening
    try:
        return None if listening is None else int(await listening.driver.fetchval("SELECT pg_backend_pid()"))
    except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError):
        return None


def idle_lines_of(store: SQLStore) -> list[Any]:
    """The connections that its only event loop keeps for the next transaction."""
    return [line for line, _ in database_of(store).connected.pool._idle]


async def damage(store: SQLStore, key: str, text: str) -> None:
    """Put another text in place of a state."""
    settings = store._settings
    pool = Pool(settings.new_source(5.0, pooler=True), size=1, pooler=True)
    try:
        async with pool.line() as line:
            sql = (
                f"UPDATE {settings.table} SET state = :state, count = 1, expires_at = 1e11 WHERE resource_name = :name"
            )
            await line.fetch(sql, {"state": text, "name": resource_name(key)})
    finally:
        await pool.aclose()


async def write_state(store: SQLStore, key: str, state: State) -> None:
    """Put a state in place of what is there."""
    from asynclock.stores.sql.rows import row_of

    settings, dialect = store._settings, store._settings.dialect()
    pool = Pool(settings.new_source(5.0, pooler=True), size=1, pooler=True)
    try:
        async with pool.line() as line:
            await line.run("BEGIN")
            await dialect.delete(line, resource_name(key))
            if state != State():
                await dialect.insert(line, row_of(key, state), 0.0)
            await line.run("COMMIT")
    finally:
        await pool.aclose()


def transactions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op of a store that is made from now on is a transaction."""
    monkeypatch.setattr(Database, "_use_fewer_statements", lambda database, transactions: None)


def is_idle(store: SQLStore) -> bool:
    """Whether no connection is in use, and nobody is about to look for notices."""
    database = database_of(store)
    looks = database._inbox is not None and database._inbox._look.is_set()
    return not looks and database.connected.pool._out == 0


def uses_of(store: SQLStore) -> int:
    """How many statements are under way without a task."""
    return len(database_of(store).connected.pool._uses)
