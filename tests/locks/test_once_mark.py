"""The mark that a run of `once` leaves: how waiters read it, and that it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from asynclock import Redlock, Skipped
from asynclock.rules.model import DONE
from tests.support.default_keys import key_of
from tests.support.proxy import Proxy
from tests.support.servers import Server, Servers
from tests.support.still_clock import Still, idle
from tests.support.waiters import LIMIT, until


@pytest.mark.parametrize("nodes", [1, 3])
async def test_waiters_do_not_poll_a_name_that_is_done(nodes: int, name: str) -> None:
    """The end of the mark is known: until then a waiter asks no more often than for a name that rests."""
    still = Still(nodes, name)
    async with still.client(lease=30.0) as client:
        await client.once(name, within=25.0)(_nothing)()
        waiting = asyncio.create_task(client(name).acquire(timeout=None))
        async with asyncio.timeout(LIMIT):
            while not idle(client):
                await asyncio.sleep(0)
        still.asked()
        began = still.clock.now()
        await still.until(began + 7.0)  # its ticket is renewed after 8 to 10 s
        assert still.asked() == []
        await still.until(began + 26.0)
        async with asyncio.timeout(LIMIT):
            await (await waiting).release()


async def _nothing() -> None: ...


@pytest.fixture
async def proxy(servers: Servers, server: Server) -> AsyncIterator[Proxy]:
    """A proxy before the server."""
    async with Proxy(servers.folder / "front.sock", server.path) as proxy:
        yield proxy


async def test_a_run_is_marked_as_done_by_a_release_that_is_delivered_late(
    server: Server, proxy: Proxy, name: str
) -> None:
    """The connection breaks as the run returns: the release that is sent on the next one carries the mark."""
    async with Redlock(proxy.url, node_timeout=1.0) as redlock:

        async def work() -> None:
            proxy.drop_requests = True
            proxy.cut()

        await redlock.once(name, within=60)(work)()
        proxy.drop_requests = False
        with server.cli() as cli:
            await until(lambda: cli.get(key_of(name)) == DONE.encode())
        assert await redlock.once(name, within=60)(_nothing)() is Skipped.DONE
