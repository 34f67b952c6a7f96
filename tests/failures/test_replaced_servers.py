"""Servers that are not new, and that a client meets for the first time or in place of others (HAZARDS D3)."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from asynclock import Redlock
from asynclock.stores.redis.keys import mark
from tests.support.busy_servers import endless, is_busy
from tests.support.cut_servers import proxies_to
from tests.support.default_keys import PREFIX, key_of
from tests.support.probes import clock_of, connection_of, in_quarantine, nodes_of
from tests.support.servers import Server, Servers
from tests.support.waiters import LONG, back, holder, until, urls_of


def info_of(server: Server) -> dict[str, Any]:
    with server.cli() as cli:
        found: Any = cli.info("server")
    return dict(found)


async def test_d3_an_aged_server_in_place_of_another_casts_no_vote(servers: Servers, name: str) -> None:
    """One of three holds is on a server whose address now belongs to another, old server, which lagged and knows no
    hold; and one node has lost its key. The two would be a majority for a rival that met the first server before."""
    some = [servers.start() for _ in range(3)]
    lagging = servers.start()
    async with AsyncExitStack() as stack:
        proxies = await proxies_to(stack, some)
        options: dict[str, Any] = {"lease": 6.0, "max_lease": 6.0, "node_timeout": 2.0}
        rival = await stack.enter_async_context(Redlock(*(each.url for each in proxies), **options))
        holds = await stack.enter_async_context(Redlock(*urls_of(some), **options))
        await until(lambda: info_of(lagging)["uptime_in_seconds"] >= 7)
        async with holds(name, renew=False) as lease:
            with some[2].cli() as cli:
                cli.delete(key_of(name))
            proxies[0].back = lagging.path
            node = nodes_of(rival)[0]
            before = connection_of(node)
            proxies[0].cut()
            await until(lambda: connection_of(node) not in (None, before))
            theirs = await rival(name).acquire(timeout=0)
            assert lease.held
            assert theirs is None
            assert not holder(lagging, name)


@pytest.mark.filterwarnings("ignore:.*forbids the check")  # else it would fail the attempt that shall fail by itself
async def test_d3_a_server_that_is_busy_as_the_client_connects_keeps_its_quarantine(
    servers: Servers, name: str
) -> None:
    """One of three restarts empty, and a script of another client runs while this client connects: the server answers
    BUSY to all questions about itself. When the script ends, it casts no vote."""
    some = [servers.start() for _ in range(3)]
    link = some[0].path.with_suffix(".link")
    link.symlink_to(some[0].path)
    async with Redlock(f"unix://{link}", *urls_of(some[1:]), lease=LONG, node_timeout=5.0) as client, client(name):
        await back(client)
        node = nodes_of(client)[0]
        link.unlink()
        some[0].restart()
        await until(lambda: node.error is not None)
        script = endless(some[0])
        await until(lambda: is_busy(some[0]))
        link.symlink_to(some[0].path)
        await until(lambda: node.error is None or "BUSY" in str(node.error))
        with some[0].cli() as cli:
            cli.script_kill()
        script.join()
        await back(client)
        assert in_quarantine(node)


async def test_d3_first_use_leaves_its_mark_on_servers_of_age(servers: Servers, name: str) -> None:
    """They may vote at once, and are marked like new ones: so that a restart with an older dump shows later."""
    some = [servers.start() for _ in range(3)]
    await until(lambda: all(info_of(each)["uptime_in_seconds"] >= 3 for each in some))
    async with Redlock(*urls_of(some), lease=1.0, max_lease=1.0, node_timeout=0.3) as client:
        await back(client)  # one that a busy machine connects late has no mark yet
        assert all(node.facts.started + 2.0 <= clock_of(client).now() for node in nodes_of(client))
        async with client(name):
            pass
    for each in some:
        with each.cli() as cli:
            assert cli.get(mark(PREFIX)) == info_of(each)["run_id"].encode()


async def test_d3_a_mark_that_was_lost_with_its_connection_is_set_again(servers: Servers, name: str) -> None:
    """Otherwise a server would look unused after it was used, and a deployment new that is not."""
    some = [servers.start() for _ in range(3)]
    async with Redlock(*urls_of(some), lease=LONG, node_timeout=5.0) as client:
        async with client(name):
            pass
        await back(client)
        before = connection_of(nodes_of(client)[0])
        with some[0].cli() as cli:
            await until(lambda: cli.delete(mark(PREFIX)))  # as if the command had never arrived
            for kind in ("normal", "pubsub"):
                cli.client_kill_filter(_type=kind, skipme=True)
            await until(lambda: connection_of(nodes_of(client)[0]) is not before)
            await until(lambda: cli.get(mark(PREFIX)) == info_of(some[0])["run_id"].encode())


async def test_a_server_in_quarantine_goes_on_keeping_its_key(servers: Servers, name: str) -> None:
    """One of three restarts with the hold in its dump. It casts no vote, but renewals reach it. Otherwise its key would
    end within the lease, and after the quarantine the node would not know the holder."""
    some = [servers.start("--dbfilename", f"{i}.rdb") for i in range(3)]
    async with Redlock(*urls_of(some), lease=LONG) as client, client(name) as lease:
        node = nodes_of(client)[0]
        with some[0].cli() as cli:
            cli.save()
        some[0].restart()
        await back(client)
        assert in_quarantine(node)
        with some[0].cli() as cli:
            cli.pexpire(key_of(name), 30_000)
            await lease.extend()
            await until(lambda: cli.pttl(key_of(name)) > 30_000)
        assert in_quarantine(node)
