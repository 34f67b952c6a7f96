"""Servers that are not quite Redis: INFO without a run_id, HELLO 3 that is answered in RESP2; and servers that swap
their addresses."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from asynclock import Redlock
from tests.support.probes import connection_of, in_quarantine, nodes_of
from tests.support.proxy import Proxy
from tests.support.servers import Server, Servers
from tests.support.waiters import LIMIT, LONG, until, works


class NamelessProxy(Proxy):
    """INFO shows no run_id, as that of Dragonfly."""

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data.replace(b"run_id:", b"run_no:"))


class OlderProxy(Proxy):
    """The server stays in RESP2, and says so, as one whose RESP3 is turned off."""

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data.replace(b"HELLO\r\n$1\r\n3", b"HELLO\r\n$1\r\n2"))


async def proxied(stack: AsyncExitStack, kind: type[Proxy], servers: list[Server]) -> list[Proxy]:
    return [await stack.enter_async_context(kind(each.path.with_suffix(".odd"), each.path)) for each in servers]


def uptime(server: Server) -> int:
    with server.cli() as cli:
        said: Any = cli.info("server")
    return int(said["uptime_in_seconds"])


async def reconnect(proxy: Proxy, node: Any) -> float:
    """Cut its connection. The seconds until it has another one."""
    before, began = connection_of(node), time.monotonic()
    proxy.cut()
    await until(lambda: connection_of(node) not in (None, before))
    return time.monotonic() - began


async def test_a_server_without_a_run_id_that_restarts_casts_no_vote(servers: Servers, name: str) -> None:
    """Its age shows the restart. One warning says that this is not certain."""
    some = [servers.start() for _ in range(3)]
    await until(lambda: all(uptime(each) >= 4 for each in some))  # it counts whole seconds
    async with AsyncExitStack() as stack:
        proxies = await proxied(stack, NamelessProxy, some)
        took = LIMIT
        while took > 0.5:  # a server whose age is read late looks younger: again, with a client that knows nothing
            with pytest.warns(RuntimeWarning, match="INFO shows no run_id"):
                client = await stack.enter_async_context(Redlock(*(each.url for each in proxies), lease=LONG))
            await works(client, name)
            node = nodes_of(client)[0]
            assert not in_quarantine(node)
            took = await reconnect(proxies[0], node)  # the server runs on
        assert not in_quarantine(node)
        some[0].restart()
        await until(lambda: node.error is None and in_quarantine(node))
        await works(client, name)


async def test_a_server_that_stays_in_resp2_sends_no_notices(server: Server, name: str) -> None:
    """Its notices would look like replies. So its waiters poll, and each gets its turn."""
    async with AsyncExitStack() as stack:
        (proxy,) = await proxied(stack, OlderProxy, [server])
        clients = [await stack.enter_async_context(Redlock(proxy.url, lease=LONG)) for _ in range(2)]
        assert not any(nodes_of(each)[0].listens for each in clients)

        async def use(client: Redlock) -> None:
            for _ in range(5):
                async with client(name, timeout=LIMIT):
                    await asyncio.sleep(0)

        await asyncio.gather(*(use(each) for each in clients for _ in range(3)))
        assert all(nodes_of(each)[0].error is None for each in clients)


async def test_two_servers_that_swap_their_addresses(servers: Servers, name: str) -> None:
    """For a moment each seems to be the other one a second time. All of them vote again."""
    some = [servers.start() for _ in range(3)]
    async with AsyncExitStack() as stack:
        proxies = await proxied(stack, Proxy, some)
        client = await stack.enter_async_context(
            Redlock(*(each.url for each in proxies), lease=LONG, trust_restarts=True)
        )
        await works(client, name)
        before = [connection_of(node) for node in nodes_of(client)[:2]]
        proxies[0].back, proxies[1].back = proxies[1].back, proxies[0].back
        for each in proxies[:2]:
            each.cut()
        await until(lambda: all(connection_of(node) not in (None, *before) for node in nodes_of(client)[:2]))
        await works(client, name)
