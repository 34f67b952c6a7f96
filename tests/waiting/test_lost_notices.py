"""Notices that are lost, late or forbidden, and servers that forget the script (HAZARDS E15, C16 to C18)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from asynclock import Redlock
from asynclock._clock import now
from asynclock.quorum.ballot import drift
from asynclock.stores.redis.scripts import SCRIPTS
from tests.support.default_keys import key_of, keys_of
from tests.support.probes import (
    acquisitions_of,
    asks_again_at,
    break_connection,
    connection_of,
    id_of,
    intercept_notices,
    listens,
    nodes_of,
    send_ticket_again,
)
from tests.support.proxy import RELEASE, Proxy
from tests.support.servers import Server
from tests.support.still_clock import Still, forgotten, idle, numbers, turns
from tests.support.user_store import state_of
from tests.support.waiters import (
    LIMIT,
    LONG,
    RENEWED_AFTER,
    SHORT,
    calls,
    holder,
    in_queue,
    queue,
    rise,
    until,
    urls_of,
)

both = pytest.mark.parametrize("nodes", [1, 5])
fair_or_not = pytest.mark.parametrize("fair", [False, True], ids=["first-come", "fair"])


# -- notices -----------------------------------------------------------------------------------------------------------


@both
@fair_or_not
async def test_e15_a_lost_notice(name: str, nodes: int, fair: bool) -> None:
    """The waiter receives no notice. Its next renewal, a third of the ticket's lifetime after it was sent, finds the
    grant, and the lease is as long as the servers' or shorter."""
    still = Still(nodes, name)
    async with still.held(lease=60.0) as (_, lease), still.client(lease=30.0) as other:
        lost: list[bytes] = []
        intercept_notices(other, lambda index, notice: lost.append(notice))
        waiting = asyncio.create_task(other(name, fair=fair).acquire(timeout=None))
        await turns()
        sent = still.clock.now()
        still.clock.advance(1.0)
        await lease.release()
        await turns()
        assert len(lost) == nodes
        assert not waiting.done()
        while not waiting.done():
            still.clock.advance(0.1)
            await turns()
            assert still.clock.now() <= sent + 10.0 + 0.2
        got = waiting.result()
        ends = sorted(state_of(store, name).holds[0].ends or 0.0 for store in still.stores)
        left = ends[nodes // 2] - still.stores[0].now()
        assert 30.0 - drift(30.0) - 0.2 <= got.remaining <= left
        await got.release()


@pytest.mark.parametrize("turn", range(5))
async def test_e15_renewed_as_the_grant_came(name: str, turn: int) -> None:
    """The ticket was granted, and renewed some turns before its notice arrives. The client has one lease, and the
    servers' hold covers its validity, whichever of the two sendings it counts from."""
    still = Still(1, name)
    async with still.held(lease=60.0) as (_, lease), still.client(lease=30.0) as other:
        late: list[tuple[int, bytes]] = []
        receive = intercept_notices(other, lambda index, notice: late.append((index, notice)))
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await turns()
        still.clock.advance(7.9)  # before the renewal is due
        await lease.release()
        await turns()
        assert len(late) == 1
        still.asked()
        still.clock.advance(2.2)
        while not still.stores[0].asked:
            await asyncio.sleep(0)
        await turns(turn)
        receive(*late[0])
        async with asyncio.timeout(LIMIT):
            got = await waiting
        held = state_of(still.stores[0], name)
        assert got.remaining <= (held.holds[0].ends or 0.0) - still.stores[0].now()
        assert got.fence == held.fence
        await turns()
        still.clock.advance(0.001)
        assert [hold.id for hold in state_of(still.stores[0], name).holds] == [id_of(got)]
        await got.release()
        assert not state_of(still.stores[0], name).holds
        assert not state_of(still.stores[0], name).queue
        assert forgotten(other)


async def test_e15_validity_counts_from_the_sending_that_was_granted(name: str) -> None:
    """The servers' hold ends when the granted ticket does: so the lease is as much shorter as the ticket is old."""
    still = Still(1, name)
    async with still.held(lease=60.0) as (_, lease), still.client(lease=30.0) as other:
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await turns()
        still.clock.advance(7.5)
        await lease.release()
        async with asyncio.timeout(LIMIT):
            got = await waiting
        left = (state_of(still.stores[0], name).holds[0].ends or 0.0) - still.stores[0].now()
        assert left == pytest.approx(22.5)
        assert got.remaining == pytest.approx(22.5 - drift(30.0))
        await got.release()


class Lossy(Proxy):
    """Loses one notice on request."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.path.with_suffix(".p"), server.path)
        self.loses = False
        self.lost = asyncio.Event()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self.loses and data.startswith(b">"):  # a reply may come before the notice
                self.loses = False
                self.lost.set()
            else:
                writer.write(data)


@pytest.mark.usefixtures("no_looks")
async def test_c18_granted_and_asked_again(server: Server, name: str) -> None:
    """The notice of a grant is lost. The renewal of the ticket is answered with the same fence, and the key's end moves
    with the answer."""
    async with Lossy(server) as proxy:
        async with Redlock(server.url, lease=LONG) as first, Redlock(proxy.url, lease=LONG) as second:
            lease = await first(name).acquire(timeout=None)
            waiting = asyncio.create_task(second(name, renew=False).acquire(timeout=None))
            await until(lambda: in_queue([server], name, 1)() and idle(second))
            proxy.loses = True
            await lease.release()
            async with asyncio.timeout(LIMIT):
                await proxy.lost.wait()
            with server.cli() as cli:
                granted: Any = cli.get(keys_of(name).fence)
                ends = now() + int(cli.pttl(key_of(name))) / 1000
            await asyncio.sleep(0.6)  # by so much its end moves
            (acquisition,) = acquisitions_of(second)
            send_ticket_again(acquisition)
            async with asyncio.timeout(LIMIT):
                got = await waiting
            assert got.fence == int(granted)
            with server.cli() as cli:
                left = int(cli.pttl(key_of(name))) / 1000
            assert now() + left > ends + 0.5
            assert got.remaining <= left + 0.002
            await got.release()


# -- servers that forget scripts, or forbid notices --------------------------------------------------------------------


@asynccontextmanager
async def through_proxies(servers: list[Server], **options: Any) -> AsyncIterator[tuple[Redlock, list[Proxy]]]:
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(Proxy(each.path.with_suffix(".p"), each.path)) for each in servers]
        yield await stack.enter_async_context(Redlock(*(each.url for each in proxies), **options)), proxies


def refused_scripts(server: Server) -> int:
    """How often it said NOSCRIPT."""
    with server.cli() as cli:
        stats: Any = cli.info("errorstats")
    return int(stats.get("errorstat_NOSCRIPT", {"count": 0})["count"])


@both
async def test_c16_noscript_answers_a_renewal(five: list[Server], name: str, nodes: int) -> None:
    """The servers forgot the script while a task waits: its ticket is renewed all the same, and the task is served."""
    servers = five[:nodes]
    async with Redlock(*urls_of(servers), lease=LONG) as first, Redlock(*urls_of(servers), lease=SHORT) as second:
        async with first(name):
            waiting = asyncio.create_task(second(name).acquire(timeout=None))
            await until(lambda: in_queue(servers, name, 1)() and idle(second))
            before = [numbers(each, name) for each in servers]
            for each in servers:
                with each.cli() as cli:
                    cli.script_flush()
            await until(lambda: all(numbers(each, name) > n for each, n in zip(servers, before, strict=True)))
            assert all(map(refused_scripts, servers))
        async with asyncio.timeout(LIMIT):
            await (await waiting).release()


@both
async def test_c16_noscript_answers_a_renewal_after_its_undo(five: list[Server], name: str, nodes: int) -> None:
    """The renewal met no script, and was undone before that answer arrived: it is not sent again, so no ticket is
    left."""
    servers = five[:nodes]
    async with Redlock(*urls_of(servers), lease=LONG) as first:
        async with first(name), through_proxies(servers, lease=LONG, node_timeout=LIMIT) as (second, proxies):
            waiting = asyncio.create_task(second(name).acquire(timeout=None))
            await until(lambda: in_queue(servers, name, 1)() and idle(second))
            script = SCRIPTS[""]
            for each, proxy in zip(servers, proxies, strict=True):
                with each.cli() as cli:
                    cli.script_flush()
                proxy.hold_replies()
            (waits,) = acquisitions_of(second)
            send_ticket_again(waits)
            await until(lambda: all(map(refused_scripts, servers)))
            undone = [proxy.request(*RELEASE) for proxy in proxies]
            for each in servers:
                with each.cli() as cli:
                    cli.script_load(script)
            waiting.cancel()
            await asyncio.wait({waiting})
            for asked in undone:
                await asked.wait()
            for proxy in proxies:
                proxy.let_go()
            for node in nodes_of(second):
                await node.probe("any")  # what would have been sent again is there by now
            assert not any(queue(each, name) for each in servers)
            assert not any(numbers(each, name) for each in servers)
            assert forgotten(second)


WITHOUT_NOTICES = {"no channels": "resetchannels", "no publish": "allchannels -publish"}


def user(server: Server, rules: str) -> str:
    """A url with a user of these rules, which may do all else."""
    with server.cli() as cli:
        cli.execute_command(*f"ACL SETUSER app reset on >pw ~* +@all {rules}".split())
    return server.url.replace("unix://", "unix://app:pw@")


async def taken_in_turn(first: Redlock, second: Redlock, name: str, fair: bool, rounds: int = 3) -> list[int]:
    """Two clients take the name in turn, and one always waits for the other. Returns their fences."""
    fences = []
    lease = await first(name, fair=fair).acquire(timeout=None)
    for client in [second, first] * rounds:
        fences.append(lease.fence)
        waiting = asyncio.create_task(client(name, fair=fair).acquire(timeout=None))
        await until(partial(idle, client))
        await lease.release()
        async with asyncio.timeout(LONG * RENEWED_AFTER / 2):
            lease = await waiting
    await lease.release()
    return fences


@pytest.mark.parametrize(("nodes", "forbidden"), [(1, 1), (5, 2), (5, 3), (5, 5)])
@fair_or_not
async def test_c17_no_channels(five: list[Server], name: str, nodes: int, forbidden: int, fair: bool) -> None:
    """The default of a new user since Redis 7. Where a majority sends no notices waiters poll, and no ticket is left to
    expire; else the other nodes notify. Either way a waiter is served long before a lease or a ticket ends."""
    urls = [user(each, WITHOUT_NOTICES["no channels"]) for each in five[:forbidden]] + urls_of(five[forbidden:nodes])
    async with Redlock(*urls, lease=LONG) as first, Redlock(*urls, lease=LONG) as second:
        assert listens(first) is (forbidden <= nodes // 2)
        fences = await taken_in_turn(first, second, name, fair)
        assert rise(fences)
        assert len(fences) == 6
        assert forgotten(first)
        assert forgotten(second)
        await until(in_queue(five[:nodes], name, 0))
        assert not any(holder(each, name) for each in five[:nodes])


@both
@fair_or_not
async def test_c17_channels_are_forbidden_while_it_waits(servers: Any, name: str, nodes: int, fair: bool) -> None:
    """From then on it polls. Its last attempts carry no ticket, and the ticket that it left before is gone
    afterwards."""
    some = [servers.start() for _ in range(nodes)]
    async with Redlock(*urls_of(some), lease=LONG) as first, Redlock(*urls_of(some), lease=LONG) as second:
        lease = await first(name, fair=fair).acquire(timeout=None)
        waiting = asyncio.create_task(second(name, fair=fair).acquire(timeout=None))
        await until(lambda: in_queue(some, name, 1)() and idle(second))
        for server in some:
            with server.cli() as cli:
                cli.execute_command("ACL", "SETUSER", "default", "resetchannels")
        ours = nodes_of(second)
        await until(lambda: all(node.error is None and not node.listens for node in ours))
        before = calls(some[0])
        async with asyncio.timeout(LONG * RENEWED_AFTER / 2):
            await until(lambda: calls(some[0]) >= before + 3)
            await lease.release()
            async with await waiting:
                await until(in_queue(some, name, 0))


async def test_c17_a_node_without_notices_comes_and_goes(servers: Any, name: str) -> None:
    """One of three nodes sends no notices. Its connection breaks and comes back: no waiter asks again because of
    that."""
    some = [servers.start() for _ in range(3)]
    urls = [*urls_of(some[:2]), user(some[2], WITHOUT_NOTICES["no channels"])]
    async with Redlock(*urls_of(some), lease=LONG) as first, Redlock(*urls, lease=LONG) as second:
        async with first(name):
            waiting = asyncio.create_task(second(name).acquire(timeout=None))
            await until(lambda: in_queue(some, name, 1)() and idle(second))
            (wait,) = acquisitions_of(second)
            due = asks_again_at(wait)
            node = nodes_of(second)[2]
            connection = connection_of(node)
            break_connection(connection)
            await until(lambda: connection_of(node) not in (connection, None))
            await asyncio.sleep(0)
            assert asks_again_at(wait) == due
            waiting.cancel()
            await asyncio.wait({waiting})


@both
@pytest.mark.parametrize("holds", list(WITHOUT_NOTICES))
async def test_c17_the_holder_may_not_publish(five: list[Server], name: str, nodes: int, holds: str) -> None:
    """The holder's user may not publish, the waiter's may subscribe: no release is half done. A holder that may not
    publish says so, and the waiter probes again and again."""
    servers = five[:nodes]
    urls = [user(each, WITHOUT_NOTICES[holds]) for each in servers]
    async with Redlock(*urls, lease=LONG) as holding, Redlock(*urls_of(servers), lease=LONG) as waiter:
        assert listens(waiter)
        for _ in range(3):
            held = await holding(name).acquire(timeout=None)
            waiting = asyncio.create_task(waiter(name).acquire(timeout=None))
            await until(lambda: in_queue(servers, name, 1)() and idle(waiter))
            await held.release()
            async with asyncio.timeout(LONG * RENEWED_AFTER / 2):
                got = await waiting
            assert got.fence > held.fence
            await got.release()
        await until(lambda: not any(holder(each, name) or queue(each, name) for each in servers))


@pytest.mark.parametrize("holds", list(WITHOUT_NOTICES))
async def test_c17_a_release_without_notices_grants_nothing(server: Server, name: str, holds: str) -> None:
    """A release that may not notify the first waiter grants it nothing, and leaves it its ticket and its place."""
    async with Redlock(user(server, WITHOUT_NOTICES[holds]), lease=LONG) as holding:
        async with through_proxies([server], lease=LONG, node_timeout=1.0) as (waiter, (proxy,)):
            lease = await holding(name).acquire(timeout=None)
            waiting = asyncio.create_task(waiter(name).acquire(timeout=None))
            await until(lambda: in_queue([server], name, 1)() and idle(waiter))
            proxy.drop_requests = True  # what it would ask by itself
            ticket = queue(server, name)
            await lease.release()
            assert holder(server, name) == b""
            assert queue(server, name) == ticket
            assert len(numbers(server, name)) == 1
            waiting.cancel()
            await asyncio.wait({waiting})
