"""What an operator, or another program, does to a database while clients use a table there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import asyncpg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock.stores.sql.engines import url_of
from tests.support.waiters import LIMIT


class Operated:
    """A database with a table and a user of the test's own. `url`: of that user. `run` is the operator's: it carries
    out a statement, and returns the first value."""

    def __init__(self, url: str, user: str, table: str, run: Callable[..., Any]) -> None:
        self.url = f"{url}?asynclock_table={table}"
        self.user = user
        self.table = table
        self.run = run

    async def held(self) -> int:
        """The number of names that are held."""
        return int(await self.run(f"SELECT count(*) FROM {self.table} WHERE count > 0"))

    async def is_free(self) -> None:
        """Returns once no name is held."""
        async with asyncio.timeout(LIMIT):
            while await self.held():
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[str]:
        """The url of another user, who may only read the table."""
        its = f"r_{uuid4().hex[:8]}"
        await self.run(f"CREATE USER {its}")
        await self.run(f"GRANT SELECT ON {self.table} TO {its}")
        yield self.url.replace(f"//{self.user}@", f"//{its}@")
        if self.is_postgresql:
            await self.run(f"DROP OWNED BY {its}")
        await self.run(f"DROP USER {its}")

    @asynccontextmanager
    async def unreadable(self) -> AsyncIterator[None]:
        """No other session may use the table, as during a migration."""
        await self.run("BEGIN" if self.is_postgresql else f"LOCK TABLES {self.table} WRITE")
        if self.is_postgresql:
            await self.run(f"LOCK TABLE {self.table} IN ACCESS EXCLUSIVE MODE")
        yield
        await self.run("ROLLBACK" if self.is_postgresql else "UNLOCK TABLES")

    @property
    def is_postgresql(self) -> bool:
        return self.url.startswith("postgresql")

    # -- PostgreSQL only -----------------------------------------------------------------------------------------

    async def connections(self) -> list[int]:
        """The connections of its user that do not listen."""
        query = "SELECT array_agg(pid) FROM pg_stat_activity WHERE usename = '{}' AND query NOT LIKE '%LISTEN%'"
        return await self.run(query.format(self.user)) or []

    async def waits(self) -> None:
        """Returns once a statement of its user waits for a lock."""
        query = "SELECT count(*) FROM pg_stat_activity WHERE usename = '{}' AND wait_event_type = 'Lock'"
        async with asyncio.timeout(LIMIT):
            while not await self.run(query.format(self.user)):
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """No other session may lock a row of the table."""
        await self.run("BEGIN")
        await self.run(f"LOCK TABLE {self.table} IN EXCLUSIVE MODE")
        yield
        await self.run("ROLLBACK")


@asynccontextmanager
async def operated_postgresql(url: str) -> AsyncIterator[Operated]:
    """There."""
    its = f"u_{uuid4().hex[:8]}"
    admin = await asyncpg.connect(url)
    try:

        async def run(statement: str) -> Any:
            async with contextlib.AsyncExitStack() as stack:
                if "SCHEMA public" in statement:
                    await stack.enter_async_context(alone(admin))
                return await admin.fetchval(statement)

        async with alone(admin):
            await admin.execute(f"CREATE ROLE {its} LOGIN; GRANT CREATE ON SCHEMA public TO {its}")
        yield Operated(url.replace("//postgres@", f"//{its}@"), its, its, run)
        async with alone(admin):
            await admin.execute(f"DROP OWNED BY {its}; DROP ROLE {its}")
    finally:
        await admin.close()


@asynccontextmanager
async def alone(admin: Any) -> AsyncIterator[None]:
    """PostgreSQL refuses two changes of the rights on a schema at the same time ("tuple concurrently updated")."""
    await admin.execute("SELECT pg_advisory_lock(1)")
    yield
    await admin.execute("SELECT pg_advisory_unlock(1)")


@asynccontextmanager
async def operated_mariadb(url: str) -> AsyncIterator[Operated]:
    """There."""
    its = f"u_{uuid4().hex[:8]}"
    engine = create_async_engine(url_of(url), isolation_level="AUTOCOMMIT")
    try:
        async with engine.connect() as connection:

            async def run(statement: str) -> Any:
                result = await connection.execute(text(statement))
                return result.scalar() if result.returns_rows else None

            await run(f"CREATE USER {its}@'%'")
            await run(f"GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON locks.* TO {its}@'%'")
            yield Operated(url.replace("//asynclock@", f"//{its}@"), its, its, run)
            await run(f"DROP TABLE IF EXISTS {its}")
            await run(f"DROP USER {its}@'%'")
    finally:
        await engine.dispose()
