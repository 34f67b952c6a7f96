"""Entering a client, and its first acquire: what only the user can solve is told at once, and an outage is waited for
(HAZARDS D12)."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from asynclock import ConfigError, QuorumUnavailable, Redlock
from tests.support.probes import nodes_of
from tests.support.servers import Server, Servers
from tests.support.waiters import until, urls_of


@pytest.mark.parametrize("nodes", [1, 3])
async def test_d12_a_misconfigured_server_is_told_at_the_start(servers: Servers, name: str, nodes: int) -> None:
    """The first acquire finds what it does not need yet: here the rights of a waiter. One node of three costs nothing.
    Once it is mended, the same client works."""
    some = [servers.start() for _ in range(3)]
    urls = [each.user("-zadd") for each in some[:nodes]]
    for use in ("acquire", "enter"):
        async with aclosing(Redlock(*urls)) as client:
            async with asyncio.timeout(4):  # no patience: waiting does not help
                with pytest.raises(ConfigError, match="zadd"):
                    await (client(name).acquire() if use == "acquire" else client.__aenter__())
            for each in some[:nodes]:
                each.user()
            async with client(name, timeout=5) as lease:
                assert lease.held
            for each in some[:nodes]:
                each.user("-zadd")
    if nodes == 3:
        some[0].user()
        some[1].user()
        async with Redlock(*urls) as client, client(name) as lease:
            assert lease.held


async def test_d12_a_monitor_needs_no_right_to_lock(server: Server, name: str) -> None:
    """inspect, holders and locked do not check for votes."""
    async with Redlock(server.url) as holder, holder(name):
        async with aclosing(Redlock(server.user("-set", "-del", "-zadd"))) as monitor:
            assert (await monitor.inspect(name)).holders
            assert await monitor(name).locked()
            assert [each.name async for each in monitor.holders()] == [name]
            assert not (await monitor.health()).ok


async def test_d12_entering_waits_for_the_end_of_an_outage(servers: Servers, name: str) -> None:
    """The server has no memory left as the program starts; entering goes on as soon as it has."""
    server = servers.start("--maxmemory", "1")
    client = Redlock(server.url, patience=20)
    entering = asyncio.create_task(client.__aenter__())
    with server.cli() as cli:
        await until(lambda: "errorstat_OOM" in cli.info("errorstats"))
        assert not entering.done()
        cli.config_set("maxmemory", 0)
    async with asyncio.timeout(10):
        await entering
    async with client, client(name) as lease:
        assert lease.held


async def test_d12_entering_waits_for_servers_that_start_later(servers: Servers, name: str) -> None:
    """A program and its three servers start together: the servers are new, so they vote at once."""
    some = [servers.start() for _ in range(3)]
    for each in some:
        each.kill()
    client = Redlock(*urls_of(some), patience=20)
    entering = asyncio.create_task(client.__aenter__())
    await asyncio.sleep(0)
    await until(lambda: _reason(client).count("refused") == 3)
    for each in some:
        each.restart()
    async with asyncio.timeout(10):
        await entering
    async with client, client(name, timeout=0) as lease:
        assert lease.held


def _reason(client: Redlock) -> str:
    return " ".join(str(node.error) for node in nodes_of(client))


@pytest.mark.parametrize("patience", [0, 0.3])
async def test_d12_entering_ends_with_patience(servers: Servers, patience: float) -> None:
    """With the reason of the node."""
    server = servers.start("--maxmemory", "1")
    client = Redlock(server.url, patience=patience)
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(QuorumUnavailable, match="OOM"):
        await client.__aenter__()
    assert loop.time() - began >= patience - 0.01
    await client.aclose()


async def test_d12_a_server_without_memory_still_gets_releases(server: Server, name: str) -> None:
    """It casts no vote, and stays connected: what is held there is released."""
    async with Redlock(server.url) as client:
        async with client(name):
            with server.cli() as cli:
                cli.config_set("maxmemory", 1)
            assert not (await client.health()).ok
        with server.cli() as cli:
            assert not cli.exists(name)
