"""Clients of servers that each have a proxy before them; and scripts that a server forgets and learns again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from asynclock import Redlock
from asynclock.stores.redis.scripts import SCRIPTS
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.waiters import back


@asynccontextmanager
async def behind_proxies(servers: list[Server], **options: Any) -> AsyncIterator[tuple[Redlock, list[Proxy]]]:
    """A client that is connected to each of them, through a proxy."""
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(Proxy(each.path.with_suffix(".p"), each.path)) for each in servers]
        client = await stack.enter_async_context(Redlock(*(each.url for each in proxies), **options))
        for each in proxies:
            stack.callback(each.let_go)
        await back(client)
        yield client, proxies


def statistic(server: Server, section: str, name: str, word: str) -> int:
    """A number of the server's own statistics; 0 where it has none."""
    with server.cli() as cli:
        found: Any = cli.info(section)
    return int(found.get(name, {}).get(word, 0))


def unknown(server: Server) -> int:
    """How often it did not know the script."""
    return statistic(server, "errorstats", "errorstat_NOSCRIPT", "count")


def whole(server: Server) -> int:
    """How often it was sent the script itself."""
    return statistic(server, "commandstats", "cmdstat_eval", "calls")


def learn(server: Server) -> None:
    """Another client loads the script."""
    with server.cli() as cli:
        cli.script_load(SCRIPTS[""])


def forget(server: Server) -> None:
    with server.cli() as cli:
        cli.script_flush()
