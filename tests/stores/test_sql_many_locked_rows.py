"""A stranger's transaction that locks many rows of a database, or the gap between rows (HAZARDS F6)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import text

from asynclock import Redlock
from asynclock.stores.sql import SQLStore, engines, lines, pool, transactions
from tests.support.sql_states import administered
from tests.support.waiters import LIMIT, LONG, until


@pytest.fixture(params=["postgresql", "mariadb"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@asynccontextmanager
async def locked(url: str, names: Sequence[str]) -> AsyncIterator[None]:
    """A stranger has locked these rows."""
    async with administered(url) as stranger:
        await stranger.execute(text("BEGIN"))
        for each in names:  # one statement might lock more rows
            await stranger.execute(text(f"SELECT 1 FROM asynclock WHERE resource_name = '{each}' FOR UPDATE"))
        yield
        await stranger.execute(text("ROLLBACK"))


async def test_f6_more_locked_rows_than_ops_at_a_time_delay_no_other_name(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each op waits for its row. Another name is acquired, and a hold is renewed and released, while they wait."""
    for module in (pool, transactions):
        monkeypatch.setattr(module, "LIMIT", 10 * LIMIT)
    store, names = SQLStore(url), [f"{name}:{number}" for number in range(SQLStore.concurrency + 8)]
    async with Redlock(store, lease=LONG, patience=LIMIT) as client:
        for each in names:
            async with client(each):
                pass
        async with client(f"{name}:held", renew=False) as lease, locked(url, names):
            acquiring = [asyncio.create_task(client(each).acquire(timeout=None)) for each in names]
            await until(lambda: sum(bool(store.delay([each], math.inf)) for each in names) >= SQLStore.concurrency)
            async with asyncio.timeout(LIMIT):
                await lease.extend()
                async with client(f"{name}:other"):
                    pass
            assert not any(each.done() for each in acquiring)
        async with asyncio.timeout(LIMIT):
            for held in await asyncio.gather(*acquiring):
                await held.release()


async def test_f6_a_locked_gap_of_mariadb_delays_no_other_name(
    mariadb_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger has locked the gap between two rows, as any range that it has read for its changes. More new names of
    that gap than the client has connections are acquired. Each waits, and a transaction of other names does not."""
    for module in (pool, transactions):
        monkeypatch.setattr(module, "LIMIT", 10 * LIMIT)
    monkeypatch.setitem(lines.MYSQL_SETTINGS, "innodb_lock_wait_timeout", f"{3 * LIMIT:.0f}")
    border, store = [f"{name}:1", f"{name}:9"], SQLStore(mariadb_url)
    names = [f"{name}:5{number}" for number in range(2 * engines.CONNECTIONS)]
    async with Redlock(store, lease=LONG, patience=LIMIT) as client:
        async with client.multi(*border):
            pass
        async with locked_between(mariadb_url, *border):
            acquiring = [asyncio.create_task(client(each).acquire(timeout=None)) for each in names]
            await until(lambda: all(store.delay([each], math.inf) for each in names))
            async with asyncio.timeout(LIMIT), client.multi(f"{name}:a", f"{name}:b"):
                pass
            assert not any(each.done() for each in acquiring)
        async with asyncio.timeout(LIMIT):
            for held in await asyncio.gather(*acquiring):
                await held.release()


@asynccontextmanager
async def locked_between(url: str, first: str, last: str) -> AsyncIterator[None]:
    """A stranger has locked the gap between two rows of MariaDB."""
    async with administered(url) as stranger:
        await stranger.execute(text("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
        await stranger.execute(text("BEGIN"))
        between = f"resource_name > '{first}' AND resource_name < '{last}'"
        await stranger.execute(text(f"SELECT 1 FROM asynclock WHERE {between} FOR UPDATE"))
        yield
        await stranger.execute(text("ROLLBACK"))
