"""`aclose` returns once the servers have answered the releases, however slow they are, as long as a command may
take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from asynclock import ConfigError, LockLost, Redlock
from asynclock.stores.redis import delivery
from tests.support.probes import connecting
from tests.support.proxied_clients import behind_proxies
from tests.support.proxy import Proxy
from tests.support.servers import Server, Servers
from tests.support.waiters import LIMIT, LONG, holder, until

pytestmark = pytest.mark.both_loops("the loop closes the transports")

nodes = pytest.mark.parametrize("nodes", [1, 3])

LAST_WORDS = 0.5
"""Seconds after which a client that awaits no reply has disconnected: five times what a connection waits at its end."""


@asynccontextmanager
async def slow(
    servers: Servers, nodes: int
) -> AsyncIterator[tuple[Redlock, list[Server], Callable[[], None], Callable[[], None]]]:
    """A client of servers each behind a proxy, and functions that hold back their replies and let them pass."""
    some = [servers.start() for _ in range(nodes)]
    async with behind_proxies(some, lease=LONG, node_timeout=10.0) as (client, proxies):
        await client.health()

        def each(what: Callable[[Proxy], None]) -> Callable[[], None]:
            return lambda: [what(proxy) for proxy in proxies] and None

        yield client, some, each(Proxy.hold_replies), each(Proxy.let_go)


async def closes_only_when_answered(client: Redlock, let_go: Callable[[], None]) -> None:
    """It waits while they are silent, for far less than a command may take, and is done once they have answered."""
    closing = asyncio.create_task(client.aclose())
    done, _ = await asyncio.wait({closing}, timeout=LAST_WORDS)
    assert not done
    let_go()
    async with asyncio.timeout(LIMIT):
        await closing


@nodes
async def test_close_waits_for_the_release_of_open_leases(servers: Servers, name: str, nodes: int) -> None:
    """The reply says that the key is gone."""
    async with slow(servers, nodes) as (client, some, hold_back, let_go):
        lease = await client(name).acquire(timeout=None)
        hold_back()
        await closes_only_when_answered(client, let_go)
        assert not any(holder(server, name) for server in some)
        with pytest.raises(LockLost):
            await lease.release()


@nodes
async def test_close_waits_for_the_undo_of_an_acquire(servers: Servers, name: str, nodes: int) -> None:
    """An acquire is under way when the client closes: it raises at once, and a possible grant is undone before the
    client is closed."""
    async with slow(servers, nodes) as (client, some, hold_back, let_go):
        hold_back()
        acquiring = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: all(holder(server, name) for server in some))
        await closes_only_when_answered(client, let_go)
        assert not any(holder(server, name) for server in some)
        with pytest.raises(ConfigError, match="closed"):
            await acquiring


@nodes
async def test_close_waits_for_an_undo_that_nobody_else_waits_for(servers: Servers, name: str, nodes: int) -> None:
    """An acquire was cancelled before the client closes, and its undo is on its way."""
    async with slow(servers, nodes) as (client, some, hold_back, let_go):
        hold_back()
        acquiring = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: all(holder(server, name) for server in some))
        acquiring.cancel()
        await asyncio.wait({acquiring})
        await closes_only_when_answered(client, let_go)
        assert not any(holder(server, name) for server in some)


@pytest.mark.usefixtures("patient_farewells")
@nodes
async def test_close_ends_a_connect_under_way(
    servers: Servers, name: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers accept and do not answer at the first use. Closing ends that and leaves no task, and the acquire
    raises."""
    monkeypatch.setattr(delivery, "AT_MOST", 2 * LIMIT)
    some = [servers.start() for _ in range(nodes)]
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(Proxy(each.path.with_suffix(".p"), each.path)) for each in some]
        for proxy in proxies:
            proxy.hold_replies()
            stack.callback(proxy.let_go)
        seen = [proxy.request(b"") for proxy in proxies]
        client = Redlock(*(proxy.url for proxy in proxies), lease=LONG, connect_timeout=3 * LIMIT)
        acquiring = asyncio.create_task(client(name).acquire(timeout=None))
        async with asyncio.timeout(LIMIT):
            for event in seen:
                await event.wait()
        opening = connecting(client)
        assert opening is not None
        closing = asyncio.create_task(client.aclose())
        done, _ = await asyncio.wait({closing}, timeout=LIMIT / 2)
        assert done, "it waits for servers that say nothing"
        assert opening.cancelled()
        with pytest.raises(ConfigError, match="closed"):
            await acquiring
