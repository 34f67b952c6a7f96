"""A program cancels all tasks of its loop, as asyncio.run does after Ctrl-C, and goes on: its client does, too."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from asynclock import Redlock
from tests.support.cut_servers import cut_proxies, heal_proxies, proxies_to
from tests.support.probes import nodes_of, pending_releases_of
from tests.support.servers import Server
from tests.support.waiters import LONG, holder, until


def cancel_all_tasks() -> None:
    """But those of the test and of its proxies."""
    for task in asyncio.all_tasks():
        if task.get_name().startswith("asynclock"):
            task.cancel()


async def test_a_client_connects_again(server: Server, name: str) -> None:
    """Its server is away. It comes back, and gets the release of a lock, although the client is not used any more."""
    async with AsyncExitStack() as stack:
        proxies = await proxies_to(stack, [server])
        client = await stack.enter_async_context(Redlock(proxies[0].url, lease=LONG))
        (node,) = nodes_of(client)
        lease = await client(name).acquire(timeout=None)
        cut_proxies(proxies)
        await until(lambda: node.error is not None)
        await lease.release()
        assert pending_releases_of(node)
        cancel_all_tasks()
        heal_proxies(proxies)
        await until(lambda: not holder(server, name))
