"""An op that leaves alone goes to a connection without a task of its own (`sending.py`, `driven.py`)."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import pytest

from asynclock import Redlock
from asynclock.stores.sql import SQLStore, pool
from asynclock.stores.sql.driven import Driven
from tests.support.proxy import TcpProxy
from tests.support.sql_states import is_idle, session, uses_of
from tests.support.waiters import LIMIT, LONG, until

CYCLES = 20


@pytest.fixture(params=["postgresql", "mariadb"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


async def cycles(client: Redlock, name: str, number: int) -> None:
    for _ in range(number):
        async with client(name):
            pass


async def test_a_free_lock_costs_no_task(url: str, name: str) -> None:
    """With one task its acquire and its release are two statements. A task for each would cost the client as much as
    the statement."""
    made, loop = list[str](), asyncio.get_running_loop()

    def counted(loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
        made.append(work.__qualname__)
        return asyncio.Task(work, loop=loop, **more)

    async with Redlock(url, lease=LIMIT) as client:
        await cycles(client, name, 3)
        loop.set_task_factory(counted)
        try:
            await cycles(client, name, CYCLES)
        finally:
            loop.set_task_factory(None)
    assert len(made) < CYCLES / 2, made  # a few: a connection that was idle for long goes back to its pool


async def test_f2_a_statement_without_an_answer_ends(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No task waits for it. Its connection is given up when its time is over, and others go on."""
    monkeypatch.setattr(pool, "_KEPT", LIMIT)  # a connection that was idle for longer is used by a task
    async with TcpProxy(urlsplit(url).port or 0) as proxy:
        # In a table of its own there is nothing to clean up: that would use the connection in its turn.
        store = SQLStore(url.replace(f":{urlsplit(url).port}", f":{proxy.port}"), "without_an_answer")
        async with Redlock(store, lease=LONG, node_timeout=LIMIT, patience=LIMIT) as client:
            await cycles(client, name, 3)
            await until(lambda: is_idle(store))
            proxy.drop_replies = proxy.drop_requests = True
            monkeypatch.setattr(pool, "LIMIT", 0.5)  # not before: a busy machine may take longer for an answer
            monkeypatch.setattr(pool, "STOPPING", 0.1)
            asking = asyncio.create_task(client(f"{name}:other").acquire(timeout=None))
            async with asyncio.timeout(LIMIT):
                while not uses_of(store):  # in each turn of the loop: on a busy machine it may be over in the next one
                    await asyncio.sleep(0)
            await until(lambda: uses_of(store) == 0)
            proxy.drop_replies = proxy.drop_requests = False
            async with asyncio.timeout(LONG):
                await asking
                await cycles(client, name, 1)


async def test_a_name_whose_row_was_removed_is_taken(postgresql_url: str, name: str) -> None:
    """At once. An acquire of a name that had a row is an UPDATE, which finds none."""
    async with Redlock(postgresql_url, lease=LIMIT) as client, session(postgresql_url) as admin:
        await cycles(client, name, 2)
        found = await admin.exec_driver_sql(f"DELETE FROM asynclock WHERE resource_name = '{name}'")
        await admin.commit()
        assert found.rowcount == 1
        lease = await client(name).acquire(timeout=0)
        assert lease is not None
        await lease.release()


async def test_a_coroutine_without_a_task_ends_as_with_one() -> None:
    """Its result, its error and its cancel come to the caller in a later turn of the loop."""
    ends, loop = list[Any](), asyncio.get_running_loop()

    async def work(future: asyncio.Future[int] | None) -> int:
        if future is None:
            raise LookupError("at once")
        return await future

    futures = [loop.create_future() for _ in range(3)]
    running = [
        Driven(work(each), lambda result, error: ends.append((result, type(error)))) for each in [None, *futures]
    ]
    for each in running:
        each.begin()
    assert ends == []
    futures[0].set_result(7)
    futures[1].set_exception(OSError())
    running[3].cancel()
    await until(lambda: len(ends) == 4)
    assert ends == [(None, LookupError), (7, type(None)), (None, OSError), (None, asyncio.CancelledError)]
