"""A contended op on PostgreSQL is two statements, which lock nothing between them (`compare_and_set.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from asynclock import Lease, LockLost, Redlock
from asynclock.stores.sql import SQLStore, lines
from tests.support.probes import contended
from tests.support.services.postgresql import own_postgresql
from tests.support.sql_states import administered, read_state
from tests.support.waiters import LONG, PATIENT, until

TABLE = "compared"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the module's own: an open transaction of another test would keep old versions of rows."""
    with own_postgresql() as server:
        yield server.url


@pytest.fixture
async def admin(url: str) -> AsyncIterator[AsyncConnection]:
    """A session of a stranger."""
    async with administered(url) as session:
        yield session


@asynccontextmanager
async def clients(url: str, number: int) -> AsyncIterator[list[Redlock]]:
    """Each with a store of its own, as another process has it."""
    async with AsyncExitStack() as stack:
        made = [Redlock(SQLStore(url, TABLE), lease=LONG, **PATIENT) for _ in range(number)]
        for each in made:
            await stack.enter_async_context(each)
            async with each("first"):  # so they make the table, and know that messages come
                pass
        yield made


async def waiter(url: str, client: Redlock, name: str, before: int) -> asyncio.Task[Lease | None]:
    """A task that waits, once its ticket is there behind so many others."""
    waits = asyncio.create_task(client(name).acquire(timeout=None))
    store = SQLStore(url, TABLE)

    async def is_there() -> bool:
        return len((await read_state(store, name)).queue) > before

    async with asyncio.timeout(LONG):
        while not await is_there():
            await asyncio.sleep(0.01)
    return waits


def after_each_read(monkeypatch: pytest.MonkeyPatch, name: str, then: Callable[[], Awaitable[object]]) -> None:
    """Do something between the next read of the row of a name and the write."""
    fetch = lines.AsyncpgLine.fetch

    async def gated(line: lines.AsyncpgLine, sql: str, params: Mapping[str, Any] = {}) -> Any:
        found = await fetch(line, sql, params)
        if "xmin" in sql and params.get("name") == name:
            monkeypatch.setattr(lines.AsyncpgLine, "fetch", fetch)
            await then()
        return found

    monkeypatch.setattr(lines.AsyncpgLine, "fetch", gated)


async def test_a_release_that_others_wait_for_is_two_statements(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the five of a transaction. The waiter has the lock after it."""
    async with clients(url, 2) as (holder, other):
        lease = await holder(name).acquire(timeout=0)
        assert lease is not None
        waits = await waiter(url, other, name, 0)
        await until(lambda: contended(lease))
        sent = list[str]()
        for method in ("fetch", "run"):
            send = getattr(lines.AsyncpgLine, method)

            async def noted(line: lines.AsyncpgLine, sql: str, *more: Any, send: Any = send) -> Any:
                sent.append(sql)
                return await send(line, sql, *more)

            monkeypatch.setattr(lines.AsyncpgLine, method, noted)
        await lease.release()
        assert len([each for each in sent if "BEGIN" in each]) == 0, sent
        assert len(sent) == 2, sent
        got = await waits
        assert got is not None
        await got.release()


async def test_a_row_that_changes_after_the_read_is_not_overwritten(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second waiter comes between the read and the write of a release. Its ticket stays: each gets the lock in its
    turn."""
    async with clients(url, 3) as (holder, first, second):
        lease = await holder(name).acquire(timeout=0)
        assert lease is not None
        waits = [await waiter(url, first, name, 0)]

        async def comes() -> None:
            waits.append(await waiter(url, second, name, 1))

        after_each_read(monkeypatch, name, comes)
        await lease.release()
        for each in waits:
            async with asyncio.timeout(LONG / 4):  # far below the life of a ticket that nobody knows
                got = await each
            assert got is not None
            await got.release()
        assert len(waits) == 2


async def test_a_row_made_anew_at_the_same_place_is_not_overwritten(
    url: str, admin: AsyncConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version is told by its writer, too: the place of a version that was removed may be used again."""
    async with clients(url, 2) as (holder, other):
        lease = await holder(name).acquire(timeout=0)
        assert lease is not None
        waits = await waiter(url, other, name, 0)
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

        after_each_read(monkeypatch, name, replaced)
        with pytest.raises(LockLost):
            await lease.release()
        assert len(set(places)) == 1
        found = await admin.exec_driver_sql(f"SELECT state FROM {TABLE} WHERE resource_name = '{name}'")
        assert "stranger--" in str(found.scalar_one())
        waits.cancel()
        await asyncio.wait({waits})
