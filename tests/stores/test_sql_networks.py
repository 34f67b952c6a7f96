"""What a client of a database does when a network drops its connections without a word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from asynclock import Redlock
from asynclock.stores.sql import listening, pool
from asynclock.stores.transactional import TransactionalNode
from tests.support.far_servers import FarDatabase
from tests.support.proxy import TcpProxy
from tests.support.waiters import LIMIT, LONG

pytestmark = pytest.mark.both_loops("the loop has the transports of the drivers")

QUICK = 0.3
"""Seconds after which a connection that does not answer is given up, here, once the network is silent."""


@pytest.fixture(params=["postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(listening, "WATCH", QUICK)
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
async def network(url: str) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(urlsplit(url).port or 0) as proxy:
        yield proxy


def through(network: TcpProxy, url: str) -> str:
    return url.replace(f":{urlsplit(url).port}", f":{network.port}")


async def test_waiters_are_woken_after_the_connections_went_silent(
    url: str, network: TcpProxy, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client finds that the connection over which its notices come does not answer, and takes another one. With
    this lease a waiter renews its ticket, and so finds a lost notice, only after 60 s."""
    async with Redlock(url) as holds, Redlock(through(network, url), lease=180, max_lease=180) as waits:
        lease = await holds(name).acquire(timeout=None)
        waiting = asyncio.create_task(waits(name).acquire(timeout=None))
        async with asyncio.timeout(LIMIT):
            while not (await holds.inspect(name)).waiters:
                await asyncio.sleep(0.01)
            network.freeze()
            monkeypatch.setattr(pool, "LIMIT", QUICK)
            monkeypatch.setattr(listening, "ANSWER", QUICK)
            await lease.release()
            await (await waiting).release()


async def test_health_of_a_database_that_is_far_away(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check takes about ten round trips, of 0.13 s each, and an acquire takes one. Both succeed."""
    monkeypatch.setattr(TransactionalNode, "check_limit", LIMIT)  # a busy machine is no distance
    async with (
        FarDatabase(urlsplit(url).port or 0) as proxy,
        Redlock(through(proxy, url), lease=LONG, connect_timeout=LIMIT) as client,
    ):
        async with client(name):  # the connections are there
            pass
        proxy.way = 0.065
        health = await client.health()
        assert health.ok, health.reason
        lease = await client(name).acquire(timeout=0)
        assert lease is not None
        await lease.release()
