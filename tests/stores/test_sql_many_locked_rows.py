"""A stranger's transaction that locks many rows of a database, or the gap between rows (HAZARDS F6)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import text

from asynclock import Redlock
from asynclock.stores.sql import SQLStore, pool, transactions
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
