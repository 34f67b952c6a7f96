"""The commits of PostgreSQL that a client does not await: those of a release that frees a name and does nothing else
(`stores/sql/single.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from asynclock import Redlock
from asynclock.stores.sql import SQLStore, engines
from asynclock.stores.sql.dialects import Dialect
from asynclock.stores.sql.pool import Pool
from asynclock.stores.sql.rows import FLOOR
from asynclock.stores.sql.sending import Single
from asynclock.stores.sql.single import statement, statement_of_one
from tests.support.probes import acquisitions_of, waits_for_notice
from tests.support.services.postgresql import PostgreSQL, own_postgresql
from tests.support.sql_states import read_rows
from tests.support.waiters import LIMIT, LONG, until

TABLE = "unflushed"
IDS = {"kilo": 5, "lima": 7}
"""Owners, each with the fence of the row that it holds, of the same name."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSQL]:
    """A server of the module's own, whose settings a test changes."""
    with own_postgresql() as server:
        yield server


@asynccontextmanager
async def standby_gone(server: PostgreSQL) -> AsyncIterator[asyncpg.Connection]:
    """Each commit that is awaited waits for a standby that is gone, until this ends."""
    session = await asyncpg.connect(server.url)
    try:
        await session.execute("ALTER SYSTEM SET synchronous_standby_names = 'gone'")
        await session.execute("SELECT pg_reload_conf()")
        async with asyncio.timeout(LIMIT):
            while not await commits_wait(server, session):
                await asyncio.sleep(0.01)
        yield session
    finally:
        await session.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
        await session.execute("SELECT pg_reload_conf()")
        await session.close()


async def commits_wait(server: PostgreSQL, session: asyncpg.Connection) -> bool:
    """Whether a commit of now waits: the checkpointer has read the settings."""
    another = await asyncpg.connect(server.url)
    pid = another.get_server_pid()
    committing = asyncio.create_task(another.execute("SELECT pg_logical_emit_message(true, '', '')"))
    try:
        while not (found := await waits(session, pid)) and not committing.done():
            await asyncio.sleep(0.01)
        return found
    finally:
        await session.execute("SELECT pg_terminate_backend($1)", pid)
        another.terminate()
        while await waits(session, pid):
            await asyncio.sleep(0.01)
        await asyncio.gather(committing, return_exceptions=True)


async def waits(session: asyncpg.Connection, pid: int | None = None) -> bool:
    """Whether that session, or any one, waits for a standby."""
    sql = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND pid = coalesce($1, pid)"
    found: bool = await session.fetchval(sql, pid)
    return found


@pytest.mark.parametrize("number", [1, 3])
async def test_a_release_waits_for_no_standby(server: PostgreSQL, name: str, number: int) -> None:
    """It ends, alone or in a statement with others, and the names are free."""
    names = [f"{name}:{each}" for each in range(number)]
    async with Redlock(SQLStore(server.url, TABLE), lease=LONG, node_timeout=LIMIT) as client:
        leases = [await client(each).acquire(timeout=None) for each in names]
        async with standby_gone(server) as session, asyncio.timeout(LIMIT):
            releasing = [asyncio.create_task(each.release()) for each in leases]
            while not all(each.done() for each in releasing):
                assert not await waits(session)
            assert not any(await asyncio.gather(*(client(each).locked() for each in names)))


async def test_a_hold_whose_release_was_lost_in_a_crash_ends_with_its_lease(name: str) -> None:
    """The server is killed right after the release. The hold is there again, and the next one has a greater token."""
    with own_postgresql(wal_writer_delay="10s") as server:
        store = SQLStore(server.url, TABLE)
        async with Redlock(store, lease=6.0, node_timeout=2.0, patience=LIMIT) as client:
            async with client(name) as before:
                pass
            server.stop()
            server.start()
            async with asyncio.timeout(LIMIT):
                await until_ready(client)
                assert (await read_rows(store, [name]))[0][name].holds == 1
                async with client(name) as after:
                    assert after.fence > before.fence


async def until_ready(client: Redlock) -> None:
    while not (await client.health()).ok:
        await asyncio.sleep(0.01)


async def test_a_release_that_serves_a_waiter_waits_for_the_standby(server: PostgreSQL, name: str) -> None:
    """Else a crash of the server could give the hold back to one whose lease ends before that of the waiter."""
    async with Redlock(SQLStore(server.url, TABLE), lease=LONG, node_timeout=LIMIT) as client:
        async with Redlock(SQLStore(server.url, TABLE), lease=LONG, node_timeout=LIMIT) as other:
            lease = await client(name).acquire(timeout=None)
            waiting = asyncio.create_task(other(name).acquire(timeout=None))
            await until(lambda: [waits_for_notice(each) for each in acquisitions_of(other)] == [True])
            async with standby_gone(server) as session, asyncio.timeout(LIMIT):
                releasing = asyncio.create_task(lease.release())
                while not await waits(session):
                    await asyncio.sleep(0.01)
                assert not releasing.done()
                assert not waiting.done()
            async with asyncio.timeout(LIMIT):
                await (await waiting).release()
                await releasing


@pytest.fixture
async def pool(server: PostgreSQL) -> AsyncIterator[Pool]:
    """With a table of two rows."""
    source = engines.EngineSource(engines.engine_of(engines.url_of(server.url), LIMIT, pooler=False), LIMIT, own=True)
    pool = Pool(source, size=1, pooler=False)
    await SQLStore(server.url, TABLE).create_schema()
    async with pool.line() as line:
        await line.run(f"DELETE FROM {TABLE}")
        for name, fence in IDS.items():
            await line.run(
                f"INSERT INTO {TABLE} (resource_name, owner, node_info, count, fence, expires_at, create_time, "
                f"update_time) VALUES ('{name}', '{name}', '', 1, {fence}, 1e18, 0, 0)"
            )
    yield pool
    await pool.aclose()


async def flushes(pool: Pool, build: Callable[[str, str, str], str], group: str, numbers: dict[str, int]) -> bool:
    """Whether the commit of this statement is awaited."""
    values = [Single(name, name, "", number, 10.0, 10.0) for name, number in numbers.items()]
    params = values[0]._asdict()
    if build is statement:
        params = {field: [getattr(each, field) for each in values] for field in Single._fields}
    async with pool.line() as line:
        await line.run("BEGIN")
        found = await line.fetch(build(TABLE, Dialect.now, group), {**params, "floor": FLOOR})
        assert len(found) == (0 if "acquire" in group else len(values))
        ((setting,),) = await line.fetch("SHOW synchronous_commit")
        await line.run("ROLLBACK")
    return setting != "off"


@pytest.mark.parametrize(
    ("numbers", "awaited"),
    [
        ({"kilo": 5}, False),
        ({"kilo": 0}, False),
        ({"kilo": 6}, True),
        ({"kilo": 5, "lima": 7}, False),
        ({"kilo": 5, "lima": 8}, True),
    ],
    ids=str,
)
async def test_a_release_that_raises_the_fence_of_a_row_is_flushed(
    pool: Pool, numbers: dict[str, int], *, awaited: bool
) -> None:
    """Each number is a token: on a quorum, one that is greater than the fence of this node."""
    builds = [statement, statement_of_one] if len(numbers) == 1 else [statement]
    assert [await flushes(pool, each, "release", numbers) for each in builds] == [awaited] * len(builds)


@pytest.mark.parametrize("group", ["acquire 1", "reacquire 1", "extend"])
@pytest.mark.parametrize("build", [statement, statement_of_one])
async def test_other_statements_are_flushed(pool: Pool, build: Callable[[str, str, str], str], group: str) -> None:
    """After a crash a grant or a renewal must be there."""
    assert await flushes(pool, build, group, {"kilo": 0})
