"""Push messages of PostgreSQL that did not arrive in time when they were tried out."""

from __future__ import annotations

import asyncio

import pytest

from asynclock import Lease, Redlock
from asynclock.stores.sql import SQLStore, push
from asynclock.stores.sql.lines import Line
from asynclock.stores.sql.listening import Listening
from asynclock.stores.sql.rows import looks_of
from tests.support.services.postgresql import pgbouncer
from tests.support.sql_states import database_of, read_rows
from tests.support.waiters import LIMIT, until

SOON = 10.0
"""Seconds that are less than a third of a lease, after which a waiter asks by itself."""

LEASE = 60.0


async def waits(client: Redlock, other: Redlock, name: str) -> asyncio.Task[Lease | None]:
    """A task that waits for the name, as the other client sees."""
    task = asyncio.create_task(client(name).acquire())
    while not (await other.inspect(name)).waiters:
        await asyncio.sleep(0.01)
    return task


async def test_push_is_tried_again_after_a_slow_start(
    postgresql_url: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told. A waiter that waits by then is served, and later ones get push messages."""
    again, tries, works = asyncio.Event(), list[float](), Listening.works

    async def late_once(self: Listening, line: Line, within: float) -> bool:
        tries.append(within)
        if len(tries) > 1:
            await again.wait()
        return await works(self, line, within) and len(tries) > 1

    table = name.replace(":", "_")
    store, theirs = SQLStore(postgresql_url, table), SQLStore(postgresql_url, table)
    caplog.set_level("INFO", "asynclock")
    async with Redlock(theirs, lease=LEASE) as other:
        assert database_of(theirs).pushes
        monkeypatch.setattr(Listening, "works", late_once)
        monkeypatch.setattr(push, "_PAUSES", (0.01, 0.01))
        monkeypatch.setattr(push, "_LATER", LIMIT)
        async with Redlock(store, lease=LEASE, connect_timeout=LIMIT) as client:
            assert not database_of(store).pushes
            assert any(
                "did not arrive within 0.25 s: waiters look for their notices" in each for each in caplog.messages
            )
            lease = await other(name).acquire()
            waiting = await waits(client, other, name)
            assert looks_of((await read_rows(theirs, [name]))[0][name])
            again.set()
            await until(lambda: database_of(store).pushes)
            for _ in range(2):  # the first ticket is from before, the second one is not
                assert lease is not None
                await lease.release()
                async with asyncio.timeout(SOON):
                    ours = await waiting
                assert ours is not None
                await ours.release()
                lease = await other(name).acquire()
                waiting = await waits(client, other, name)
                assert not looks_of((await read_rows(theirs, [name]))[0][name])
            waiting.cancel()
    assert sum("arrive now" in each for each in caplog.messages) == 1


async def test_behind_a_pooler_push_is_not_tried_again(
    postgresql_url: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is wrong there, and nothing is told."""
    caplog.set_level("INFO", "asynclock")
    with pgbouncer(postgresql_url) as url:
        async with Redlock(SQLStore(url, name.replace(":", "_"))) as client:
            async with client(name):
                pass
    assert not any("push" in each for each in caplog.messages)
