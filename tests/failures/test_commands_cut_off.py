"""A server refused commands for now, or the connection broke under them: what a node does with them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from asynclock import QuorumUnavailable, Redlock
from asynclock.rules.model import ID_LENGTH
from tests.support.busy_servers import endless, is_busy
from tests.support.cut_servers import FaultyProxy, cut_proxies, heal_proxies, proxies_to
from tests.support.default_keys import keys_of
from tests.support.probes import (
    connection_of,
    id_of,
    nodes_of,
    pending_releases_of,
    send_ticket_again,
    tickets_of,
    times_sent,
    unanswered,
)
from tests.support.servers import Server, Servers
from tests.support.still_clock import idle
from tests.support.waiters import LONG, back, holder, in_queue, until, urls_of


@pytest.mark.parametrize("nodes", [1, 3])
async def test_c12_a_release_that_a_busy_server_refused_is_sent_again(servers: Servers, name: str, nodes: int) -> None:
    """Nothing was done, and the connection is good: the release is sent again on the same connection until it is
    carried out, long before the lease ends."""
    some = [servers.start() for _ in range(nodes)]
    async with Redlock(*urls_of(some), lease=LONG) as client:
        lease = await client(name).acquire(timeout=None)
        before = [*map(connection_of, nodes_of(client))]
        threads = [endless(each) for each in some]
        await until(lambda: all(is_busy(each) for each in some))
        await lease.release()
        await until(lambda: all(len(pending_releases_of(node)) == 1 for node in nodes_of(client)))
        for each in some:
            with each.cli() as cli:
                cli.script_kill()
        for thread in threads:
            thread.join()
        await until(lambda: not any(holder(each, name) for each in some))
        assert [*map(connection_of, nodes_of(client))] == before


@pytest.mark.parametrize("nodes", [1, 3])
async def test_a_script_that_failed_half_way_is_undone(servers: Servers, name: str, nodes: int) -> None:
    """The reply is an error of the script itself, which may have set the hold before: it is undone."""
    some = [servers.start() for _ in range(nodes)]
    async with AsyncExitStack() as stack:
        proxies = await proxies_to(stack, some)
        client = await stack.enter_async_context(Redlock(*(each.url for each in proxies), lease=LONG))
        await client.health()  # what the first use still had to answer has come
        for proxy in proxies:
            proxy.instead = b"*2\r\n:1\r\n", b"-ERR user_script:88: half-way\r\n"
        with pytest.raises(QuorumUnavailable, match="half-way"):
            await client(name).acquire(timeout=0)
        await until(lambda: not any(holder(each, name) for each in some))


async def test_a_ticket_cut_off_on_its_way_meets_a_tombstone(servers: Servers, name: str) -> None:
    """One of three connections breaks under the renewal of a ticket, which may be in the server's socket; it is renewed
    on the next connection. As the waiter leaves, the ticket's id leaves a tombstone at that node."""
    some = [servers.start() for _ in range(3)]
    async with AsyncExitStack() as stack:
        proxies = await proxies_to(stack, some)
        client = await stack.enter_async_context(
            Redlock(*(each.url for each in proxies), lease=LONG, node_timeout=15.0)
        )
        holds = await stack.enter_async_context(Redlock(*urls_of(some), lease=LONG))
        lease = await holds(name).acquire(timeout=None)
        waiting = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: in_queue(some, name, 1)() and idle(client))
        ((ticket, wait),) = tickets_of(client).items()
        before = times_sent(wait)
        proxies[2].drop_requests = True
        send_ticket_again(wait)
        await until(lambda: times_sent(wait) > before and unanswered(connection_of(nodes_of(client)[2])))
        await cut_and_back(proxies[2:], client)
        await until(lambda: times_sent(wait) > before + 1 and idle(client))
        assert tickets_of(client) == {ticket: wait}
        waiting.cancel()
        await asyncio.wait({waiting})
        await until(in_queue(some, name, 0))
        assert [has_tombstone(each, name, ticket) for each in some] == [False, False, True]
        await lease.release()


async def test_an_attempt_cut_off_on_its_way_meets_a_tombstone(servers: Servers, name: str) -> None:
    """One of three connections breaks under an attempt that the other two grant. Its release comes when the third is
    connected again, and leaves a tombstone there."""
    some = [servers.start() for _ in range(3)]
    async with AsyncExitStack() as stack:
        proxies = await proxies_to(stack, some)
        client = await stack.enter_async_context(
            Redlock(*(each.url for each in proxies), lease=LONG, node_timeout=15.0)
        )
        proxies[2].drop_requests = True
        lease = await client(name).acquire(timeout=None)
        await cut_and_back(proxies[2:], client)
        await lease.release()
        await until(lambda: has_tombstone(some[2], name, id_of(lease)))
        assert not any(has_tombstone(each, name, id_of(lease)) for each in some[:2])


def has_tombstone(server: Server, name: str, id: str) -> bool:
    with server.cli() as cli:
        return bool(cli.exists(keys_of(name).undone + id[:ID_LENGTH]))


async def cut_and_back(proxies: list[FaultyProxy], client: Redlock) -> None:
    """They break, and are connected anew."""
    before = [*map(connection_of, nodes_of(client))]
    cut_proxies(proxies)
    await until(
        lambda: (
            sum(connection_of(node) is not old for node, old in zip(nodes_of(client), before, strict=True))
            == len(proxies)
        )
    )
    heal_proxies(proxies)
    await back(client)


@pytest.mark.parametrize("nodes", [1, 3])
async def test_an_adoption_cut_off_on_its_way_meets_a_tombstone(servers: Servers, name: str, nodes: int) -> None:
    """The connection of the last node breaks under it, so it may be in the server's socket. A single node is asked
    again; of three the others are enough. Its release leaves a tombstone at that node."""
    some = [servers.start() for _ in range(nodes)]
    async with AsyncExitStack() as stack:
        proxies = await proxies_to(stack, some)
        client = await stack.enter_async_context(
            Redlock(*(each.url for each in proxies), lease=LONG, node_timeout=15.0)
        )
        holds = await stack.enter_async_context(Redlock(*urls_of(some), lease=LONG))
        handle = await (await holds(name).acquire(timeout=None)).detach()
        proxies[-1].drop_requests = True
        adopting = asyncio.create_task(client.adopt(handle))
        await until(lambda: unanswered(connection_of(nodes_of(client)[-1])))
        await cut_and_back(proxies[-1:], client)
        lease = await adopting
        await lease.release()
        await until(lambda: has_tombstone(some[-1], name, id_of(lease)))
        await until(lambda: holder(some[-1], name) != id_of(lease).encode())
