"""Locks of a PostgreSQL that others wait for, and the statements that a client sends about them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from asynclock import Lease, Redlock
from asynclock.stores.sql import SQLStore, lines
from tests.support.probes import contended
from tests.support.sql_states import read_state
from tests.support.waiters import LONG, PATIENT, until


@asynccontextmanager
async def clients(url: str, table: str, number: int) -> AsyncIterator[list[Redlock]]:
    """Each with a store of its own, as another process has it."""
    async with AsyncExitStack() as stack:
        made = [Redlock(SQLStore(url, table), lease=LONG, **PATIENT) for _ in range(number)]
        for each in made:
            await stack.enter_async_context(each)
            async with each("first"):  # so they make the table, and know that messages come
                pass
        yield made


async def waiter(url: str, table: str, client: Redlock, name: str, before: int) -> asyncio.Task[Lease | None]:
    """A task that waits, once its ticket is there behind so many others."""
    waits = asyncio.create_task(client(name).acquire(timeout=None))
    store = SQLStore(url, table)

    async def is_there() -> bool:
        return len((await read_state(store, name)).queue) > before

    async with asyncio.timeout(LONG):
        while not await is_there():
            await asyncio.sleep(0.01)
    return waits


async def contended_lease(
    url: str, table: str, holder: Redlock, other: Redlock, name: str
) -> tuple[Lease, asyncio.Task[Lease | None]]:
    """A lease that another client waits for, as the holder knows; and that wait."""
    lease = await holder(name).acquire(timeout=0)
    assert lease is not None
    waits = await waiter(url, table, other, name, 0)
    await until(lambda: contended(lease))
    return lease, waits


async def get_the_lock(*waits: asyncio.Task[Lease | None]) -> None:
    """In this order, and before the tickets are renewed, which is after 16 s: else nobody knows of the waiters."""
    for each in waits:
        async with asyncio.timeout(LONG / 10):
            lease = await each
        assert lease is not None
        await lease.release()


def noted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """The statements from now on that are about this name, as they are sent."""
    fetch, sent = lines.AsyncpgLine.fetch, list[str]()

    async def noting(line: lines.AsyncpgLine, sql: str, params: Mapping[str, Any] = {}) -> Any:
        if any(str(each).startswith(name) for each in params.values()):
            sent.append(sql)
        return await fetch(line, sql, params)

    monkeypatch.setattr(lines.AsyncpgLine, "fetch", noting)
    return sent
