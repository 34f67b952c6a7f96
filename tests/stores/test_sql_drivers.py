"""psycopg and aiomysql, which users may name in a url or have in their engine. All kinds of locks run over them with
`make drivers`; here is what the drivers do in another way than asyncpg and asyncmy."""

from __future__ import annotations

import asyncio
import gc
import random
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import ConfigError, QuorumUnavailable, Redlock
from asynclock.events import NodeDown, NodeUp
from asynclock.stores.port import Reconnecting
from asynclock.stores.sql import SQLStore, engines
from tests.support.proxy import TcpProxy
from tests.support.services.postgresql import pgbouncer
from tests.support.sql_states import database_of
from tests.support.waiters import LIMIT, LONG, until

DRIVERS = {"postgresql": "psycopg", "mariadb": "aiomysql"}


@pytest.fixture(params=DRIVERS)
def url(request: pytest.FixtureRequest) -> str:
    """Of a server, with the driver."""
    driver = DRIVERS[request.param]
    if find_spec(driver) is None:
        pytest.skip(f"{driver} is not installed")
    scheme, _, rest = request.getfixturevalue(f"{request.param}_url").partition(":")
    return f"{scheme}+{driver}:{rest}"


async def test_random_cancels_leave_nothing(url: str, name: str) -> None:
    """By url and with an engine of the user, which exclude each other."""
    engine = create_async_engine(url)
    inside = 0
    async with Redlock(url, patience=LIMIT) as one, Redlock(SQLStore(engine), patience=LIMIT) as two:

        async def work(client: Redlock) -> None:
            nonlocal inside
            async with client(name):
                inside += 1
                try:
                    assert inside == 1
                    await asyncio.sleep(0)
                finally:
                    inside -= 1

        for _ in range(6):
            tasks = [asyncio.create_task(work(client)) for client in (one, two, one, two)]
            await asyncio.wait(tasks, timeout=random.random() / 50)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert [each for each in tasks if not each.cancelled() and each.exception()] == []
        async with asyncio.timeout(LIMIT):
            for client in (one, two):
                async with client(name):
                    pass
    await engine.dispose()


async def test_a_server_that_is_gone_is_down_and_comes_back(url: str, name: str) -> None:
    """psycopg has no code for the error of a connection."""
    events: list[Any] = []
    async with TcpProxy(urlsplit(url).port or 0) as proxy:
        mine = url.replace(f":{urlsplit(url).port}", f":{proxy.port}")
        async with Redlock(mine, patience=LIMIT) as client:
            client.subscribe(events.append)
            async with client(name):
                pass
            proxy.away = True
            proxy.cut()
            with pytest.raises(QuorumUnavailable):
                await client(name).acquire(timeout=0)
            await until(lambda: any(isinstance(each, NodeDown) for each in events))
            proxy.away = False
            await until(lambda: any(isinstance(each, NodeUp) for each in events))
            async with asyncio.timeout(LIMIT), client(name):
                pass


async def test_f15_idle_connections_that_are_cut_with_the_others_are_no_outage(url: str, name: str) -> None:
    """These drivers notice that only when they use them again. The client opens its node again after the first one, and
    tells nobody."""
    events: list[Any] = []
    async with TcpProxy(urlsplit(url).port or 0) as proxy:
        store = SQLStore(url.replace(f":{urlsplit(url).port}", f":{proxy.port}"))
        async with Redlock(store, lease=LONG, patience=LIMIT) as client:
            client.subscribe(events.append)
            async with client(name):
                pass
            proxy.cut()
            database_of(store)._lose(Reconnecting("one of them was closed"))  # noqa: SLF001
            async with client(name, timeout=LIMIT):
                pass
    assert [each for each in events if isinstance(each, NodeDown)] == []


async def test_a_database_that_is_not_there_is_a_config_error(url: str) -> None:
    """The same."""
    with pytest.raises(ConfigError, match="nowhere"):
        async with Redlock(url.rpartition("/")[0] + "/nowhere", patience=LIMIT):
            pass


@pytest.mark.parametrize("url", ["mariadb"], indirect=True)
async def test_a_connection_that_is_cut_is_closed(url: str) -> None:
    """aiomysql would leave that to the garbage collector, with a warning."""
    source = engines.EngineSource(engines.engine_of(engines.url_of(url), LIMIT, pooler=False), LIMIT, own=True)
    line: Any = await source.connect()
    line.abandon()
    assert line.driver.closed
    await source.aclose()


async def test_a_connect_that_is_cancelled_leaves_no_connection(url: str) -> None:
    """At whatever moment; no task is left either."""
    before = asyncio.all_tasks()
    for tenths in range(0, 60, 6):  # of a millisecond
        client = Redlock(url)
        entering = asyncio.create_task(client.__aenter__())
        await asyncio.wait({entering}, timeout=tenths / 10_000)
        entering.cancel()
        await asyncio.wait({entering})
        await client.aclose()
        assert asyncio.all_tasks() == before
    del client, entering
    gc.collect()  # a warning would be an error


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_psycopg_behind_a_pooler_prepares_no_statements(url: str, postgresql_url: str, name: str) -> None:
    """It prepares what it has sent five times, under names that it counts: another connection of the pooler may have
    them already."""
    with pgbouncer(postgresql_url) as bouncer:
        async with Redlock(
            bouncer.replace("postgresql:", "postgresql+psycopg:"), patience=0, connect_timeout=LIMIT, node_timeout=5.0
        ) as client:

            async def work(number: int) -> None:
                for _ in range(4):
                    async with client(f"{name}:{number}"):
                        pass

            async with asyncio.timeout(LIMIT):
                await asyncio.gather(*(work(number) for number in range(8)))
