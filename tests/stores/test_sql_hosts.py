"""A url that names several hosts of PostgreSQL, and a standby that becomes the primary."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import pytest

from asynclock import QuorumUnavailable, Redlock
from asynclock.stores.sql.hosts import Hosts
from tests.support.probes import acquisitions_of, nodes_of, waits_for_notice
from tests.support.proxy import TcpProxy
from tests.support.services.postgresql_pair import Pair, postgresql_pair
from tests.support.waiters import LIMIT, reconnected, until

DRIVERS = [
    "postgresql",
    pytest.param("postgresql+psycopg", marks=pytest.mark.skipif(not find_spec("psycopg"), reason="not installed")),
]


def url_of(ports: list[int], driver: str = "postgresql") -> str:
    hosts = "&".join(f"host=127.0.0.1:{port}" for port in ports)
    return f"{driver}://postgres@/postgres?{hosts}&target_session_attrs=read-write"


def port_of(url: str) -> int:
    return urlsplit(url).port or 0


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_silent_host_does_not_hide_the_others(postgresql_url: str, name: str, driver: str) -> None:
    """A machine that is switched off stands first in the url. A driver alone would ask it until the time of the connect
    is over."""
    async with TcpProxy(port_of(postgresql_url)) as silent:
        silent.drop_requests = True
        url = url_of([silent.port, port_of(postgresql_url)], driver)
        async with asyncio.timeout(LIMIT), Redlock(url, connect_timeout=2.0) as client, client(name) as lease:
            assert lease.held


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_host_that_answers_as_its_connect_is_cancelled(postgresql_url: str, driver: str) -> None:
    """Nobody gets that connection, so it is closed. Else it stays open until the garbage collector finds it, and
    psycopg warns of it."""
    name = driver.partition("+")[2] or "asyncpg"
    module, port = importlib.import_module(name), port_of(postgresql_url)
    arrived: list[Any] = []

    async def connect(host: str, port: int) -> Any:
        login = {"host": host, "port": port, "user": "postgres"}
        connects = module.connect if name == "asyncpg" else module.AsyncConnection.connect
        arrived.append(await connects(**login))
        connecting.cancel()
        return arrived[0]

    hosts = Hosts(connect, LIMIT)
    connecting = asyncio.create_task(hosts.connected(host=["127.0.0.1", "127.0.0.1"], port=[port, port]))
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await until(lambda: arrived[0].is_closed() if name == "asyncpg" else arrived[0].closed)


async def test_all_connections_lead_to_the_host_of_the_last_one(postgresql_url: str, name: str) -> None:
    """An older primary is back, stands first in the url, and would take connections: one client would use two
    servers."""
    async with TcpProxy(port_of(postgresql_url)) as first, TcpProxy(port_of(postgresql_url)) as second:
        first.away = True
        async with Redlock(url_of([first.port, second.port]), patience=LIMIT, connect_timeout=LIMIT) as client:
            async with client(name):
                pass
            first.away = False
            (node,) = nodes_of(client)
            back = asyncio.create_task(reconnected(node))
            await asyncio.sleep(0)
            second.cut()
            await back
            async with client(name):
                pass
            assert (bool(first.connections), bool(second.connections)) == (False, True)


async def test_the_error_names_each_host(name: str) -> None:
    """And what is wrong with it."""
    client = Redlock(url_of([1, 2]), patience=0)
    with pytest.raises(QuorumUnavailable, match=r"127\.0\.0\.1:1: .*failed") as caught:
        await client(name).acquire(timeout=0)
    await client.aclose()
    assert "127.0.0.1:2: " in str(caught.value)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with postgresql_pair(synchronous=True) as pair:
        yield pair


async def test_locks_outlive_a_failover_to_a_synchronous_standby(pair: Pair, name: str) -> None:
    """The primary is killed, and its standby promoted. Holders keep their leases, waiters are woken by push messages of
    the new primary, and tokens rise. The old primary comes back as a standby, first in the url, and is not used."""
    first = pair.primary
    async with Redlock(pair.url(), patience=LIMIT, lease=600.0, max_lease=600.0) as client:
        async with Redlock(pair.url(), patience=LIMIT, lease=600.0, max_lease=600.0) as other:
            lease = await client(name).acquire(timeout=None)
            waiting = asyncio.create_task(other(name).acquire(timeout=None))
            await until(lambda: [waits_for_notice(each) for each in acquisitions_of(other)] == [True])
            back = [asyncio.create_task(reconnected(*nodes_of(each))) for each in (client, other)]
            await asyncio.sleep(0)
            await asyncio.to_thread(first.stop)
            await asyncio.to_thread(pair.promote)
            await asyncio.gather(*back)
            async with asyncio.timeout(LIMIT):
                await lease.extend()
                await until(lambda: [waits_for_notice(each) for each in acquisitions_of(other)] == [True])
                await lease.release()
                after = await waiting
            assert after is not None
            assert after.fence > lease.fence
            await asyncio.to_thread(pair.rewind)
            async with Redlock(pair.url(), connect_timeout=LIMIT) as third:
                assert await third(name).acquire(timeout=0) is None
            await after.release()
