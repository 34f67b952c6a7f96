"""A contended op on PostgreSQL is two statements, which lock nothing between them (`compare_and_set.py`)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from asynclock import ConfigError, LockLost, QuorumUnavailable
from asynclock.stores.sql import compare_and_set, lines, pool
from asynclock.stores.sql.database import Database
from tests.support.contended_rows import clients, contended_lease, get_the_lock, noted, waiter
from tests.support.probes import contended, stores_of
from tests.support.services.postgresql import own_postgresql
from tests.support.sql_states import administered, idle_lines_of
from tests.support.waiters import LONG, until

TABLE = "compared"
"""Of the test that runs."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the module's own: an open transaction of another test would keep old versions of rows."""
    with own_postgresql() as server:
        yield server.url


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each test has a table of its own."""
    monkeypatch.setitem(globals(), "TABLE", re.sub(r"\W", "_", name))


@pytest.fixture(autouse=True)
def by_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """No statement serves the queue of a mutex without them (`test_sql_serving.py`)."""
    monkeypatch.setattr(Database, "serves", lambda database, key: False)


@pytest.fixture
async def admin(url: str) -> AsyncIterator[AsyncConnection]:
    """A session of a stranger."""
    async with administered(url) as session:
        yield session


def after_next_read(monkeypatch: pytest.MonkeyPatch, name: str, then: Callable[[], Awaitable[object]]) -> asyncio.Event:
    """Do something between the next read of the row of a name and the write. The event is set once that is done."""
    fetch, done = lines.AsyncpgLine.fetch, asyncio.Event()

    async def gated(line: lines.AsyncpgLine, sql: str, params: Mapping[str, Any] = {}) -> Any:
        found = await fetch(line, sql, params)
        if "xmin" in sql and params.get("name") == name:
            monkeypatch.setattr(lines.AsyncpgLine, "fetch", fetch)
            await then()
            done.set()
        return found

    monkeypatch.setattr(lines.AsyncpgLine, "fetch", gated)
    return done


async def test_a_release_that_others_wait_for_is_two_statements(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the five of a transaction. The waiter has the lock after it."""
    async with clients(url, TABLE, 2) as (holder, other):
        lease, waits = await contended_lease(url, TABLE, holder, other, name)
        sent = noted(monkeypatch, name)
        await lease.release()
        assert ["xmin" in each for each in sent] == [True, True], sent
        await get_the_lock(waits)


async def test_a_row_that_changes_after_the_read_is_not_overwritten(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second waiter comes between the read and the write of a release. Its ticket stays: each gets the lock in its
    turn. The next op of that client on the name is a transaction at once."""
    monkeypatch.setattr(compare_and_set, "_HOT", LONG)
    async with clients(url, TABLE, 3) as (holder, first, second):
        lease, wait = await contended_lease(url, TABLE, holder, first, name)
        waits = [wait]

        async def comes() -> None:
            waits.append(await waiter(url, TABLE, second, name, 1))

        after_next_read(monkeypatch, name, comes)
        await lease.release()
        sent = noted(monkeypatch, name)
        assert await holder(name).acquire(timeout=0) is None
        assert sent
        assert not any("xmin" in each for each in sent)
        assert len(waits) == 2
        await get_the_lock(*waits)


async def test_a_row_made_anew_at_the_same_place_is_not_overwritten(
    url: str, admin: AsyncConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version is told by its writer, too: the place of a version that was removed may be used again."""
    async with clients(url, TABLE, 2) as (holder, other):
        lease, waits = await contended_lease(url, TABLE, holder, other, name)
        places = list[str]()

        async def place() -> str:
            found = await admin.exec_driver_sql(f"SELECT ctid FROM {TABLE} WHERE resource_name = '{name}'")
            return str(found.scalar_one())

        async def replaced() -> None:
            """By the same row, but for the hold, which is a stranger's."""
            places.append(await place())
            number = int(places[0].strip("()").split(",")[1])
            await admin.exec_driver_sql(f"CREATE TEMPORARY TABLE was AS SELECT * FROM {TABLE}")
            await admin.exec_driver_sql("UPDATE was SET state = replace(state, left(owner, 10), 'stranger--')")
            await admin.exec_driver_sql(f"DELETE FROM {TABLE}")
            await admin.exec_driver_sql(f"VACUUM {TABLE}")
            for other_name in [f"other {each}" for each in range(number - 1)]:
                await admin.exec_driver_sql(
                    f"INSERT INTO {TABLE} (resource_name, owner, node_info, count, fence, expires_at, keep_until, "
                    f"create_time, update_time) VALUES ('{other_name}', '', '', 0, 0, 0, 0, 0, 0)"
                )
            await admin.exec_driver_sql(f"INSERT INTO {TABLE} SELECT * FROM was WHERE resource_name = '{name}'")
            places.append(await place())

        after_next_read(monkeypatch, name, replaced)
        with pytest.raises(LockLost):
            await lease.release()
        assert len(set(places)) == 1
        found = await admin.exec_driver_sql(f"SELECT state FROM {TABLE} WHERE resource_name = '{name}'")
        assert "stranger--" in str(found.scalar_one())
        waits.cancel()
        await asyncio.wait({waits})


async def test_f6_a_row_that_is_locked_after_the_read_is_written_once(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another session locks the row between the read and the write of a release. Nothing is written, and the waiter is
    told nothing, until that session has ended."""
    async with clients(url, TABLE, 2) as (holder, other):
        lease, waits = await contended_lease(url, TABLE, holder, other, name)
        session = await asyncpg.connect(url)
        try:

            async def locked() -> None:
                await session.execute("BEGIN")
                await session.execute(f"SELECT 1 FROM {TABLE} WHERE resource_name = $1 FOR UPDATE", name)

            read = after_next_read(monkeypatch, name, locked)
            releasing = asyncio.create_task(lease.release())
            await read.wait()
            found = await session.fetchval(f"SELECT count FROM {TABLE} WHERE resource_name = $1", name)
            assert found == 1
            assert not waits.done()
            await session.execute("COMMIT")
        finally:
            session.terminate()
        await releasing
        await get_the_lock(waits)


async def test_f23_a_connection_that_ends_before_the_write_loses_no_release(
    url: str, admin: AsyncConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends all connections of the client between the read and the write. It is not known whether the release
    was carried out, so it is sent again: the waiter gets the lock."""
    async with clients(url, TABLE, 2) as (holder, other):
        lease, waits = await contended_lease(url, TABLE, holder, other, name)

        async def cut() -> None:
            await admin.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            )

        after_next_read(monkeypatch, name, cut)
        with suppress(QuorumUnavailable):
            await lease.release()
        await get_the_lock(waits)


async def test_a_connection_outlives_an_op_that_is_refused_as_another_kind(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules refuse it after the read. Its connection is good for the next op."""
    monkeypatch.setattr(pool, "_KEPT", LONG)
    async with clients(url, TABLE, 1) as (client,):
        async with client.read(name):
            (store,) = stores_of(client)
            before = idle_lines_of(store)
            with pytest.raises(ConfigError):
                await client(name).acquire(timeout=0)
            assert before
            assert set(before) <= set(idle_lines_of(store))


async def test_f6_a_locked_table_is_asked_by_transactions_only(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait 20 ms for it at first, and then in turn. A read without a lock waits longer, so once it has met the
    lock no further one is sent for a second."""
    async with clients(url, TABLE, 2) as (holder, other):
        names = [f"{name}:{number}" for number in range(12)]
        leases = [await holder(each).acquire(timeout=0) for each in names]
        waits = [await waiter(url, TABLE, other, each, 0) for each in names]
        await until(lambda: all(each is not None and contended(each) for each in leases))
        session, sent = await asyncpg.connect(url), noted(monkeypatch, name)
        try:
            await session.execute("BEGIN")
            await session.execute(f"LOCK TABLE {TABLE}")
            releasing = [asyncio.create_task(each.release()) for each in leases if each is not None]
            await until(lambda: sum("FOR UPDATE) AS t" in each for each in sent) > len(names))
            assert sum("xmin" in each for each in sent) <= 8  # four connections of each client
            await session.execute("COMMIT")
        finally:
            session.terminate()
        await asyncio.gather(*releasing)
        for each in await asyncio.gather(*waits):
            assert each is not None
            await each.release()


async def test_a_standby_is_asked_by_a_transaction(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a standby shows may be behind its primary, so its read decides nothing. A transaction is refused there."""
    monkeypatch.setattr(compare_and_set, "IS_STANDBY", "true")
    async with clients(url, TABLE, 2) as (holder, other):
        lease, waits = await contended_lease(url, TABLE, holder, other, name)
        sent = noted(monkeypatch, name)
        await lease.release()
        assert ["FOR UPDATE) AS t" in each for each in sent].count(True) == 1, sent
        await get_the_lock(waits)
