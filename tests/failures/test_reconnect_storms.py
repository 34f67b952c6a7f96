"""Connections that the server, or a proxy before it, closes: idle ones now and then, or each one soon."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

import pytest

from asynclock import Redlock
from asynclock.events import NodeDown, NodeUp
from asynclock.stores.redis.reconnect import LASTING, Backoff
from tests.support.probes import nodes_of
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.told import told
from tests.support.waiters import PATIENT, back, until


class Counting(Proxy):
    """Counts its connections."""

    connections = 0

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await super()._replies(reader, writer)


async def close_each(proxy: Proxy, client: Redlock) -> None:
    """Close each connection once the client is connected."""
    (node,) = nodes_of(client)
    while True:
        if node.error is None:
            proxy.cut()
        await asyncio.sleep(0.001)


async def test_f15_a_server_that_closes_each_connection_is_down(
    server: Server, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The client backs off, and says so once. It is up once a connection has lasted."""
    caplog.set_level(logging.INFO, "asynclock")
    async with Counting(server.path.with_suffix(".p"), server.path) as proxy:
        async with aclosing(Redlock(proxy.url, **PATIENT)) as client:
            with told(client) as seen:
                async with client(name):
                    pass
                closing = asyncio.create_task(close_each(proxy, client))
                await until(lambda: seen.of(NodeDown))
                assert "soon after it was made" in seen.of(NodeDown)[0].error
                before = proxy.connections
                await asyncio.sleep(1.5)
                assert proxy.connections - before < 20
                closing.cancel()
                await until(lambda: len(seen.of(NodeUp)) == 2)
                async with client(name):
                    pass
    assert len(seen.of(NodeDown)) == 1
    assert [vars(each).get("asynclock_event") for each in caplog.records] == ["NodeUp", "NodeDown", "NodeUp"]


async def test_f15_an_idle_connection_that_a_proxy_closes(
    server: Server, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Again and again: it is made anew at once, nothing is told, and the lease is held."""
    async with Counting(server.path.with_suffix(".p"), server.path) as proxy:
        async with aclosing(Redlock(proxy.url, **PATIENT)) as client:
            with told(client) as seen:
                async with client(name) as lease:
                    for number in (2, 3):
                        await asyncio.sleep(1.1 * LASTING)
                        proxy.cut()
                        await until(lambda number=number: proxy.connections == number)
                        await back(client)
                    assert lease.held
    assert len(seen.of(NodeUp)) == 1
    assert seen.of(NodeDown) == []
    assert caplog.records == []


def test_the_first_reconnect_follows_at_once() -> None:
    """Also a second one, if the connection has lasted."""
    backoff = Backoff()
    for now in (0.0, 10.0, 20.0):
        assert backoff.begin(now) == 0.0
        backoff.connected(now)
    assert not backoff.in_storm


def test_the_pauses_grow_until_a_connection_has_lived() -> None:
    """Connections that were closed at once, as many as it takes."""
    backoff, now, pauses = Backoff(), 0.0, list[float]()
    for _ in range(12):
        pauses.append(backoff.begin(now))
        now += pauses[-1]
        backoff.connected(now)
    assert pauses[:2] == [0.0, 0.0]
    assert all(0.0 < each <= 2.0 for each in pauses[2:])
    assert all(each >= 1.0 for each in pauses[-3:])
    assert backoff.in_storm
    assert backoff.begin(now + 1.1 * LASTING) == 0.0
    assert not backoff.in_storm
