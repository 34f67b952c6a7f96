"""A lock in ZooKeeper and its session: the connection is lost, the server is frozen or starts again, the session
expires, the client hangs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError

from asynclock import ConfigError, LockLost, QuorumUnavailable, Redlock
from asynclock.events import Event, NodeDown, NodeUp, ReleaseFailed
from asynclock.stores.zookeeper.connection import SessionState
from asynclock.stores.zookeeper.store import ZooKeeperStore
from tests.support.fake_clock import FakeClock
from tests.support.probes import acquisitions_of, nodes_of, waits_for_notice
from tests.support.proxy import TcpProxy
from tests.support.services.zookeeper import ZooKeeper
from tests.support.waiters import LIMIT, reconnected, until
from tests.support.zookeeper_clients import SOON, behind, client_of
from tests.support.zookeeper_probes import asks, change, contenders_of, watchers_of, zookeeper_session


def take_over_and_close(server: ZooKeeper, session: tuple[int, bytes] | None) -> None:
    """A session, from another client. In one thread: a body that loses its lease meanwhile is cancelled, and the client
    is closed for all that."""
    other = KazooClient(server.address, client_id=session)
    with contextlib.suppress(KazooTimeoutError):  # displaced meanwhile, on a busy machine: see `end_session`
        other.start()
    other.stop()
    other.close()


async def end_session(server: ZooKeeper, client: Redlock) -> None:
    """Another client takes the session over and closes it, as an expiry does. The two displace each other, so it may
    need several tries."""
    session = zookeeper_session(client)
    while zookeeper_session(client) in (session, None):
        await asyncio.to_thread(take_over_and_close, server, session)
        await asyncio.sleep(0.2)


async def children(client: Redlock, name: str) -> int:
    """How many hold the name or wait for it, by another client."""
    info = await client.inspect(name)
    return len(info.holders) + sum(each.tasks for each in info.waiters)


# -- the session expires ---------------------------------------------------------------------------------------------


async def test_d7_an_expired_session_ends_its_holds_at_once(shared_zookeeper: ZooKeeper, name: str) -> None:
    """Not when the lease ends, 30 s later. The next session does not bring the hold back, and has greater fences."""
    async with client_of(shared_zookeeper) as client, client_of(shared_zookeeper) as other:
        with pytest.raises(LockLost) as lost:
            async with asyncio.timeout(LIMIT), client(name) as lease:
                await end_session(shared_zookeeper, client)
                await asyncio.Event().wait()
        assert lost.value.reason == "expired"
        assert not lease.held
        async with asyncio.timeout(SOON):
            async with other(name) as next_lease:
                assert next_lease.fence > lease.fence
            async with client(name) as again:
                assert again.fence > next_lease.fence
        assert not contenders_of(client)


async def test_a_waiter_whose_session_expires_enqueues_again(shared_zookeeper: ZooKeeper, name: str) -> None:
    """And gets the lock."""
    async with client_of(shared_zookeeper) as client, client_of(shared_zookeeper) as other:
        async with asyncio.timeout(LIMIT):
            async with other(name):
                waiting = asyncio.create_task(client(name).acquire(timeout=None))
                await until_it_waits(client)
                await end_session(shared_zookeeper, client)
                await until_async(lambda: children(other, name), 2)
                assert not waiting.done()
            lease = await waiting
            await lease.release()


async def until_it_waits(client: Redlock) -> None:
    """Its only acquire has its refusal, and watches."""
    await until(lambda: [waits_for_notice(each) for each in acquisitions_of(client)] == [True])


async def until_async(ask: Callable[[], Any], wanted: object) -> None:
    while await ask() != wanted:
        await asyncio.sleep(0.01)


async def test_b6_a_hold_that_nobody_renews_ends_though_the_session_lives(
    shared_zookeeper: ZooKeeper, name: str
) -> None:
    """As on other stores: without a renewal, or after max_hold, the name is free when the lease is over."""
    async with client_of(shared_zookeeper, 1.0) as client, client_of(shared_zookeeper) as other:
        began = time.monotonic()
        unrenewed = await client(f"{name}:a", renew=False).acquire(timeout=None)
        limited = await client(f"{name}:b", max_hold=0.5).acquire(timeout=None)
        for each in "ab":
            async with asyncio.timeout(SOON), other(f"{name}:{each}"):
                assert 0.95 < time.monotonic() - began < SOON
        assert not unrenewed.held
        assert not limited.held


# -- the connection is lost ------------------------------------------------------------------------------------------


async def test_a_lost_connection_is_no_lost_lock(
    zookeeper_proxy: TcpProxy, shared_zookeeper: ZooKeeper, name: str
) -> None:
    """The session lives on: the lease is held, and renewed once the connection is back. The events say so."""
    told: list[Event] = []
    async with behind(zookeeper_proxy) as client, client_of(shared_zookeeper) as other:
        client.subscribe(told.append)
        async with client(name) as lease:
            zookeeper_proxy.away = True
            zookeeper_proxy.cut()
            await until(lambda: any(isinstance(each, NodeDown) for each in told))
            assert lease.held
            assert not (await client.health()).ok
            assert await other(name).acquire(timeout=0) is None
            with pytest.raises(QuorumUnavailable):
                await lease.extend()
            zookeeper_proxy.away = False
            await until(lambda: any(isinstance(each, NodeUp) for each in told))
            await lease.extend()
            assert lease.held
        async with asyncio.timeout(SOON), other(name):
            pass


async def test_a_server_that_accepts_and_never_answers(zookeeper_proxy: TcpProxy, name: str) -> None:
    """As one that has just started may do. The client hangs up, and opens the session again before it ends."""
    told: list[Event] = []
    async with behind(zookeeper_proxy, session=9.0) as client:
        client.subscribe(told.append)
        async with client(name) as lease:
            zookeeper_proxy.hold_replies()
            zookeeper_proxy.cut()
            await until(lambda: zookeeper_proxy.held)
            zookeeper_proxy.freeze()
            zookeeper_proxy.let_go()
            await until(lambda: any(isinstance(each, NodeUp) for each in told))
            await lease.extend()


class Clocked(ZooKeeperStore):
    """Servers, for a client whose clock the test moves."""

    clock: Any = None

    def __init__(self, url: str, clock: FakeClock) -> None:
        super().__init__(url)
        self.clock = clock


async def test_each_lost_connection_has_its_time_to_come_back(shared_zookeeper: ZooKeeper) -> None:
    """The connection is lost, comes back, and is lost again: the node is down only after the time of the second loss,
    which is that of connect_timeout here."""
    clock, told = FakeClock(), list[Event]()
    async with Redlock(Clocked(shared_zookeeper.url(), clock), connect_timeout=1.0) as client:
        client.subscribe(told.append)
        change(client, SessionState.SUSPENDED)
        clock.advance(0.6)
        change(client, SessionState.CONNECTED)
        change(client, SessionState.SUSPENDED)
        clock.advance(0.6)
        assert not told
        clock.advance(0.5)
        assert isinstance(told[0], NodeDown)
        change(client, SessionState.CONNECTED)


async def test_a_wrong_use_is_told_while_the_connection_is_lost(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The servers answer that the name is in use as another kind, and the connection is lost at that moment: the error
    says what is wrong, and not that the client connects again."""
    async with client_of(shared_zookeeper) as client, client_of(shared_zookeeper) as other:
        async with other(name):
            asking = asyncio.create_task(client.read(name).acquire(timeout=0))
            while not asks(client):
                await asyncio.sleep(0)
            change(client, SessionState.SUSPENDED)
            with pytest.raises(ConfigError, match="another kind"):
                async with asyncio.timeout(LIMIT):
                    await asking
            change(client, SessionState.CONNECTED)


@pytest.mark.parametrize("how", ["asks again", "gives up"])
async def test_c2_a_create_without_a_reply(
    zookeeper_proxy: TcpProxy, shared_zookeeper: ZooKeeper, name: str, how: str
) -> None:
    """The node is created, and the reply is lost. The client finds it by the id in its name: it holds the lock with
    it, or deletes it. It would stay for as long as the session, and nobody could enter."""
    async with behind(zookeeper_proxy) as client, client_of(shared_zookeeper) as other:
        async with client(name):  # from now on the node of the name exists
            pass
        created = zookeeper_proxy.request(b"m__lock__")
        zookeeper_proxy.drop_replies = True
        timeout = None if how == "asks again" else 2.0  # a request that leaves later is not sent
        acquiring = asyncio.create_task(client(name).acquire(timeout=timeout))
        async with asyncio.timeout(SOON):
            await created.wait()
            await until_async(lambda: children(other, name), 1)
            if how == "gives up":
                with pytest.raises(QuorumUnavailable):
                    await acquiring
            zookeeper_proxy.drop_replies = False
            zookeeper_proxy.cut()
            if how == "asks again":
                lease = await acquiring
                assert lease is not None
                assert await children(other, name) == 1
                await lease.release()
            async with other(name):
                assert await children(other, name) == 1
        await until(lambda: not contenders_of(client))


async def test_c2_f7_a_release_that_did_not_arrive(
    zookeeper_proxy: TcpProxy, shared_zookeeper: ZooKeeper, name: str
) -> None:
    """The session lives on, and would keep the node: it is deleted when the connection is back."""
    told: list[Event] = []
    async with behind(zookeeper_proxy) as client, client_of(shared_zookeeper) as other:
        client.subscribe(told.append)
        async with client(name):
            zookeeper_proxy.away = True
            zookeeper_proxy.cut()
        assert any(isinstance(each, ReleaseFailed) for each in told)
        assert await other(name).acquire(timeout=0) is None
        zookeeper_proxy.away = False
        async with asyncio.timeout(SOON), other(name):
            pass


async def test_a16_cancelled_while_the_connection_is_lost(
    zookeeper_proxy: TcpProxy, shared_zookeeper: ZooKeeper, name: str
) -> None:
    """A waiter is cancelled. Its node is deleted when the connection is back, and blocks nobody."""
    async with behind(zookeeper_proxy) as client, client_of(shared_zookeeper) as other:
        async with other(name):
            waiting = asyncio.create_task(client(name).acquire())
            await until_it_waits(client)
            zookeeper_proxy.away = True
            zookeeper_proxy.cut()
            waiting.cancel()
            await asyncio.wait({waiting})
            zookeeper_proxy.away = False
            async with asyncio.timeout(SOON):
                await until_async(lambda: children(other, name), 1)
        await until(lambda: not contenders_of(client))


async def test_e15_a_release_while_the_waiter_is_disconnected(
    zookeeper_proxy: TcpProxy, shared_zookeeper: ZooKeeper, name: str
) -> None:
    """Its watch is lost with the connection. It looks again as soon as that is back, and not at its next renewal."""
    async with behind(zookeeper_proxy) as client, client_of(shared_zookeeper) as other:
        lease = await other(name).acquire(timeout=None)
        waiting = asyncio.create_task(client(name).acquire(timeout=None))
        await until_it_waits(client)
        zookeeper_proxy.away = True
        zookeeper_proxy.cut()
        await lease.release()
        zookeeper_proxy.away = False
        async with asyncio.timeout(SOON):
            await (await waiting).release()


@pytest.mark.parametrize("fair", [False, True])
async def test_a_waiter_keeps_its_place_in_an_outage(
    zookeeper_proxy: TcpProxy, shared_zookeeper: ZooKeeper, name: str, fair: bool
) -> None:
    """It asks while no server is in reach, and tries on when one is. Its session lives on, and so does its place: it
    gets the lock before a waiter that came later."""
    told: list[Event] = []
    async with (
        behind(zookeeper_proxy) as client,
        client_of(shared_zookeeper) as later,
        client_of(shared_zookeeper) as other,
        asyncio.timeout(LIMIT),
    ):
        client.subscribe(told.append)
        lease = await other(name).acquire(timeout=None)
        waiting = asyncio.create_task(client(name, fair=fair).acquire(timeout=None))
        await until_it_waits(client)
        behind_it = asyncio.create_task(later(name).acquire(timeout=None))
        await until_it_waits(later)
        zookeeper_proxy.away = True
        zookeeper_proxy.cut()
        await until(lambda: any(isinstance(each, NodeDown) for each in told))
        await until(lambda: all(each.planner.in_outage for each in acquisitions_of(client)))
        zookeeper_proxy.away = False
        await until(lambda: any(isinstance(each, NodeUp) for each in told))
        await until_it_waits(client)
        await lease.release()
        first = await waiting
        assert not behind_it.done()
        await first.release()
        await (await behind_it).release()


async def test_d7_broken_after_the_connection_was_lost(
    zookeeper_proxy: TcpProxy, shared_zookeeper: ZooKeeper, name: str
) -> None:
    """The holder watches its node again once the connection is back: it learns of a break at once."""
    async with behind(zookeeper_proxy) as client, client_of(shared_zookeeper) as other:
        (node,) = nodes_of(client)
        with pytest.raises(LockLost) as lost:
            async with asyncio.timeout(SOON), client(name):
                await until(lambda: watchers_of(client) == 1)
                back = asyncio.create_task(reconnected(node))
                zookeeper_proxy.cut()
                await back
                await until(lambda: watchers_of(client) == 1)
                assert await other.break_lock(name)
                await asyncio.Event().wait()
        assert lost.value.reason == "broken"


async def test_c20_no_server(name: str) -> None:
    """The error says why."""
    client = Redlock("zookeeper://127.0.0.1:1/locks", patience=0.3, connect_timeout=SOON)
    with pytest.raises(QuorumUnavailable, match=r"127.0.0.1:1: .*refused"):
        await client(name).acquire(timeout=None)
    assert "refused" in (await client.health()).reason
    await client.aclose()


async def test_c21_a_server_that_says_nothing(name: str) -> None:
    """It accepts the connection. The error comes in time, and a close does not wait for it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with asyncio.timeout(SOON):
        client = Redlock(f"zookeeper://127.0.0.1:{port}/locks", connect_timeout=0.5)
        with pytest.raises(QuorumUnavailable, match=r"does not answer .*but opens no session"):
            await client(name).acquire(timeout=0)
        await client.aclose()
    silent.close()
