"""A PostgreSQL whose synchronous standby is gone: a commit that is awaited waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from tests.support.services.postgresql import PostgreSQL
from tests.support.waiters import LIMIT

_COMMITS = "SELECT pg_logical_emit_message(true, '', '')"


@asynccontextmanager
async def standby_gone(server: PostgreSQL) -> AsyncIterator[asyncpg.Connection]:
    """Until this ends. A session that can look on."""
    session = await asyncpg.connect(server.url)
    try:
        await _set_standbys(session, "gone")
        async with asyncio.timeout(LIMIT):
            while not await _commits_wait(server, session):
                await asyncio.sleep(0.01)
        yield session
    finally:
        await _set_standbys(session, "")
        await session.close()


async def _set_standbys(session: asyncpg.Connection, names: str) -> None:
    await session.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
    await session.execute("SELECT pg_reload_conf()")


async def _commits_wait(server: PostgreSQL, session: asyncpg.Connection) -> bool:
    """Whether a commit of now waits for a standby. They do once the checkpointer has read the settings. SHOW tells what
    its own session has read."""
    another = await asyncpg.connect(server.url)
    pid = another.get_server_pid()
    committing = asyncio.create_task(another.execute(_COMMITS))
    try:
        while not (found := await waits(session, _COMMITS)) and not committing.done():
            await asyncio.sleep(0.01)
        return found
    finally:
        await session.execute("SELECT pg_terminate_backend($1)", pid)  # it obeys also while it waits
        another.terminate()
        while await waits(session, _COMMITS):
            await asyncio.sleep(0.01)
        await asyncio.gather(committing, return_exceptions=True)


async def waits(session: asyncpg.Connection, statement: str = "%") -> bool:
    """Whether a session waits for a standby, with a statement like this."""
    sql = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query LIKE $1"
    found: bool = await session.fetchval(sql, statement)
    return found
