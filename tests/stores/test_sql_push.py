"""Push messages of PostgreSQL that did not arrive in time when they were tried out."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from typing import Any
from urllib.parse import urlsplit

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import Lease, Redlock
from asynclock.stores.sql import SQLStore, pool, push
from asynclock.stores.sql.engines import url_of
from asynclock.stores.sql.lines import SET_UP, Line
from asynclock.stores.sql.listening import Listening
from asynclock.stores.sql.rows import looks_of
from tests.support.operators import Operated
from tests.support.proxy import TcpProxy
from tests.support.services.postgresql import pgbouncer
from tests.support.sql_states import administered, database_of, idle_lines_of, listening_pid, read_rows
from tests.support.waiters import LIMIT, healthy, until

SOON = 10.0
"""Seconds that are less than a third of a lease, after which a waiter asks by itself."""

LEASE = 60.0

SEVERAL = 3
"""Connections; a client has one more."""

SLOWLY = 1.4
"""Seconds, 0.7 of the time for a connect."""


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
        await until(lambda: database_of(theirs).pushes)  # on a busy machine the first try may be late
        caplog.clear()
        monkeypatch.setattr(Listening, "works", late_once)
        monkeypatch.setattr(push, "_PUSH", 0.25)
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


async def test_connections_that_are_in_use_when_push_comes_are_replaced(
    postgresql_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sessions have no limits for statements. A busy connection would never be idle for so long that it goes
    back by itself."""
    again, works = asyncio.Event(), Listening.works

    async def after(self: Listening, line: Line, within: float) -> bool:
        return again.is_set() and await works(self, line, within)

    monkeypatch.setattr(Listening, "works", after)
    monkeypatch.setattr(push, "_PAUSES", (0.01, 0.01))
    monkeypatch.setattr(push, "_LATER", LIMIT)
    for constant in ("LIMIT", "_KEPT"):
        monkeypatch.setattr(pool, constant, LEASE)
    store = SQLStore(postgresql_url, name.replace(":", "_"))
    async with Redlock(store, lease=LEASE, connect_timeout=LIMIT, patience=LIMIT) as client:
        await healthy(client)
        assert not database_of(store).pushes
        lines = database_of(store).connected.pool
        async with asyncio.timeout(LIMIT), AsyncExitStack() as stack:
            for _ in range(SEVERAL):
                await stack.enter_async_context(lines.line())
            again.set()
            while not any(each.is_set_up for each in idle_lines_of(store)):  # one is set up at once
                await asyncio.sleep(0.01)
        async with asyncio.timeout(LIMIT), AsyncExitStack() as stack:
            for _ in range(SEVERAL):
                line = await stack.enter_async_context(lines.line())
                assert await line.fetch("SHOW statement_timeout") == [(SET_UP["statement_timeout"],)]


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


def count_tasks(name: str) -> int:
    return [each.get_name() for each in asyncio.all_tasks()].count(name)


async def test_f26_a_client_that_loses_its_listening_connection_to_another_program_tries_once(
    postgresql_url: str, name: str
) -> None:
    """The pool of the pooler is used up then. One task tries to listen again, and the one that looked whether others
    need the connection has ended."""
    with pgbouncer(postgresql_url, "session", 2) as url:
        store, engine = SQLStore(url, name.replace(":", "_")), create_async_engine(url_of(url))
        async with (
            Redlock(store, lease=LEASE, connect_timeout=1.0, patience=LIMIT) as client,
            administered(postgresql_url) as admin,
            asyncio.TaskGroup() as tasks,
        ):
            theirs = tasks.create_task(engine.connect().start())  # it waits in the queue of the pooler
            while database_of(store).pushes:
                if (pid := await listening_pid(store)) is not None:
                    await admin.exec_driver_sql(f"SELECT pg_terminate_backend({pid})")
                await asyncio.sleep(0.05)
            await until(lambda: not count_tasks("asynclock looks for room"))  # it was cancelled a moment ago
            assert count_tasks("asynclock tries push") == 1
            async with client(name):
                pass
            await (await theirs).close()
        await engine.dispose()


async def test_a_client_that_closes_as_it_begins_to_listen_leaves_no_connection(
    postgresql: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection that could listen waits for another client of the event loop, which connects just then. It is no
    connection of the pool of the program's engine any more."""
    works, is_direct = Listening.works, Listening.is_direct
    tries, again, tried = list[Listening](), asyncio.Event(), asyncio.Event()

    async def late_once(self: Listening, line: Line, within: float) -> bool:
        tries.append(self)
        if len(tries) > 1:
            await again.wait()
        return await works(self, line, within) and len(tries) > 1

    async def noted(self: Listening) -> bool:
        found = await is_direct(self)
        if again.is_set():
            tried.set()
        return found

    monkeypatch.setattr(Listening, "works", late_once)
    monkeypatch.setattr(Listening, "is_direct", noted)
    monkeypatch.setattr(push, "_PAUSES", (0.01, 0.01))
    monkeypatch.setattr(push, "_LATER", LIMIT)
    engine = create_async_engine(url_of(postgresql.url.partition("?")[0]))
    store = SQLStore(engine, postgresql.table)
    async with aclosing(Redlock(store, connect_timeout=LIMIT)) as client, asyncio.timeout(2 * LIMIT):
        await healthy(client)
        async with database_of(store).push.opening:
            again.set()
            await tried.wait()
            await client.aclose()
        await engine.dispose()
        while await postgresql.run(f"SELECT count(*) FROM pg_stat_activity WHERE usename = '{postgresql.user}'"):
            await asyncio.sleep(0.02)


async def test_a_client_that_closes_while_the_others_of_its_event_loop_listen_again(
    postgresql_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has ended the connection that listens. The others notice nothing."""
    store, events = SQLStore(postgresql_url, name.replace(":", "_")), list[Any]()
    add, adding, closed = Listening.add, asyncio.Event(), asyncio.Event()

    async def slowly(self: Listening, tag: str) -> None:
        adding.set()
        await closed.wait()
        await add(self, tag)

    async with Redlock(store) as client, Redlock(store) as other, administered(postgresql_url) as admin:
        await until(lambda: database_of(store).pushes)  # on a busy machine the first try may be late
        client.subscribe(events.append)
        monkeypatch.setattr(Listening, "add", slowly)
        await admin.exec_driver_sql(f"SELECT pg_terminate_backend({await listening_pid(store)})")
        await adding.wait()
        await other.aclose()
        closed.set()
        async with client(name, timeout=LIMIT):
            pass
    assert [each for each in events if type(each).__name__ == "NodeDown"] == []


async def test_a_listening_connection_that_ends_while_a_client_connects_is_made_again(
    postgresql_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after LISTEN. Else the client would be connected, and would get no notices."""
    add, ended = Listening.add, list[Listening]()

    async def add_and_end(self: Listening, tag: str) -> None:
        await add(self, tag)
        if not ended:
            ended.append(self)
            self.driver.terminate()
            await until(lambda: self._lost is None)

    monkeypatch.setattr(Listening, "add", add_and_end)
    store = SQLStore(postgresql_url, name.replace(":", "_"))
    async with Redlock(store, patience=LIMIT, connect_timeout=LIMIT):
        assert ended
        assert database_of(store).push._listening is not None  # noqa: SLF001


@pytest.mark.parametrize("again", [False, True], ids=["at the start", "after an outage"])
async def test_a_connect_that_takes_most_of_its_time_is_no_outage(
    postgresql_url: str, name: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection that listens is a second one. It takes as long as the first one, and comes later at the latest."""
    monkeypatch.setattr(push, "_PAUSES", (0.1, 0.1))
    port, table = urlsplit(postgresql_url).port or 0, name.replace(":", "_")
    async with TcpProxy(port) as proxy:
        proxy.delay = 0.0 if again else SLOWLY
        store = SQLStore(postgresql_url.replace(f":{port}/", f":{proxy.port}/"), table)
        async with Redlock(store, connect_timeout=SLOWLY / 0.7, patience=LIMIT) as client:
            if again:
                await until(lambda: database_of(store).pushes)
                proxy.delay = SLOWLY
                proxy.cut()
            async with client(name):
                pass
            await until(lambda: database_of(store).push._listening is not None)  # noqa: SLF001
            assert database_of(store).pushes
