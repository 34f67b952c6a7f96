"""A lock in ZooKeeper and its session: the connection is lost, the server is frozen or starts again, the session
expires, the client hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient

from asynclock import ConfigError, LockLost, QuorumUnavailable, Redlock
from asynclock.events import Event, NodeDown, NodeUp, ReleaseFailed
from tests.support.probes import acquisitions_of, contenders_of, waits_for_notice, zookeeper_session
from tests.support.proxy import TcpProxy
from tests.support.services.zookeeper import ZooKeeper, ZooKeepers
from tests.support.waiters import LIMIT, until

pytestmark = pytest.mark.one_loop("the session is in the threads of kazoo")

SHORT = 2.0
"""Seconds of a session that is to expire."""

SOON = 5.0
"""Seconds that are far less than the 30 s of a usual session."""


@pytest.fixture
def zookeepers() -> Iterator[ZooKeepers]:
    """Servers of the test's own, which it may freeze and kill."""
    pool = ZooKeepers()
    yield pool
    pool.stop()


@pytest.fixture
async def proxy(shared_zookeeper: ZooKeeper) -> AsyncIterator[TcpProxy]:
    """In front of the shared server."""
    async with TcpProxy(shared_zookeeper.port) as proxy:
        yield proxy


def behind(proxy: TcpProxy, session: float = 30.0) -> Redlock:
    """A client behind a proxy."""
    url = f"zookeeper://127.0.0.1:{proxy.port}/locks?session_timeout={session:g}"
    return Redlock(url, lease=session, node_timeout=0.3, patience=LIMIT)


def client_of(server: ZooKeeper, session: float = 30.0, **options: Any) -> Redlock:
    return Redlock(server.url(session_timeout=session), lease=session, **options)


async def end_session(server: ZooKeeper, client: Redlock) -> None:
    """Another client takes the session over and closes it, as an expiry does."""
    other = KazooClient(server.address, client_id=zookeeper_session(client))
    for each in (other.start, other.stop, other.close):
        await asyncio.to_thread(each)


async def children(client: Redlock, name: str) -> int:
    """How many hold the name or wait for it, by another client."""
    info = await client.inspect(name)
    return len(info.holders) + sum(each.tasks for each in info.waiters)


# -- the session expires ---------------------------------------------------------------------------------------------


async def test_d7_an_expired_session_ends_its_holds_at_once(shared_zookeeper: ZooKeeper, name: str) -> None:
    """Not when the lease ends, 30 s later. The next session does not bring the hold back, and has greater fences."""
    async with client_of(shared_zookeeper) as client, client_of(shared_zookeeper) as other:
        with pytest.raises(LockLost) as lost:
            async with asyncio.timeout(SOON), client(name) as lease:
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
        async with asyncio.timeout(SOON):
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


async def test_a_lost_connection_is_no_lost_lock(proxy: TcpProxy, shared_zookeeper: ZooKeeper, name: str) -> None:
    """The session lives on: the lease is held, and renewed once the connection is back. The events say so."""
    told: list[Event] = []
    async with behind(proxy) as client, client_of(shared_zookeeper) as other:
        client.subscribe(told.append)
        async with client(name) as lease:
            proxy.away = True
            proxy.cut()
            await until(lambda: any(isinstance(each, NodeDown) for each in told))
            assert lease.held
            assert not (await client.health()).ok
            assert await other(name).acquire(timeout=0) is None
            with pytest.raises(QuorumUnavailable):
                await lease.extend()
            proxy.away = False
            await until(lambda: any(isinstance(each, NodeUp) for each in told))
            await lease.extend()
            assert lease.held
        async with asyncio.timeout(SOON), other(name):
            pass


@pytest.mark.parametrize("how", ["asks again", "gives up"])
async def test_c2_a_create_without_a_reply(proxy: TcpProxy, shared_zookeeper: ZooKeeper, name: str, how: str) -> None:
    """The node is created, and the reply is lost. The client finds it by the id in its name: it holds the lock with
    it, or deletes it. It would stay for as long as the session, and nobody could enter."""
    async with behind(proxy) as client, client_of(shared_zookeeper) as other:
        async with client(name):  # from now on the node of the name exists
            pass
        created = proxy.request(b"m__lock__")
        proxy.drop_replies = True
        timeout = None if how == "asks again" else 0.2
        acquiring = asyncio.create_task(client(name).acquire(timeout=timeout))
        await created.wait()
        async with asyncio.timeout(SOON):
            await until_async(lambda: children(other, name), 1)
            if how == "gives up":
                with pytest.raises(QuorumUnavailable):
                    await acquiring
            proxy.drop_replies = False
            proxy.cut()
            if how == "asks again":
                lease = await acquiring
                assert lease is not None
                assert await children(other, name) == 1
                await lease.release()
            async with other(name):
                assert await children(other, name) == 1
        await until(lambda: not contenders_of(client))


async def test_c2_a_release_that_did_not_arrive(proxy: TcpProxy, shared_zookeeper: ZooKeeper, name: str) -> None:
    """The session lives on, and would keep the node: it is deleted when the connection is back."""
    told: list[Event] = []
    async with behind(proxy) as client, client_of(shared_zookeeper) as other:
        client.subscribe(told.append)
        async with client(name):
            proxy.away = True
            proxy.cut()
        assert any(isinstance(each, ReleaseFailed) for each in told)
        assert await other(name).acquire(timeout=0) is None
        proxy.away = False
        async with asyncio.timeout(SOON), other(name):
            pass


async def test_a16_cancelled_while_the_connection_is_lost(
    proxy: TcpProxy, shared_zookeeper: ZooKeeper, name: str
) -> None:
    """A waiter is cancelled. Its node is deleted when the connection is back, and blocks nobody."""
    async with behind(proxy) as client, client_of(shared_zookeeper) as other:
        async with other(name):
            waiting = asyncio.create_task(client(name).acquire())
            await until_it_waits(client)
            proxy.away = True
            proxy.cut()
            waiting.cancel()
            await asyncio.wait({waiting})
            proxy.away = False
            async with asyncio.timeout(SOON):
                await until_async(lambda: children(other, name), 1)
        await until(lambda: not contenders_of(client))


async def test_e15_a_release_while_the_waiter_is_disconnected(
    proxy: TcpProxy, shared_zookeeper: ZooKeeper, name: str
) -> None:
    """Its watch is lost with the connection. It looks again as soon as that is back, and not at its next renewal."""
    async with behind(proxy) as client, client_of(shared_zookeeper) as other:
        lease = await other(name).acquire(timeout=None)
        waiting = asyncio.create_task(client(name).acquire(timeout=None))
        await until_it_waits(client)
        proxy.away = True
        proxy.cut()
        await lease.release()
        proxy.away = False
        async with asyncio.timeout(SOON):
            await (await waiting).release()


async def test_d7_broken_after_the_connection_was_lost(proxy: TcpProxy, shared_zookeeper: ZooKeeper, name: str) -> None:
    """The holder watches its node again once the connection is back: it learns of a break at once."""
    told: list[Event] = []
    async with behind(proxy) as client, client_of(shared_zookeeper) as other:
        client.subscribe(told.append)
        with pytest.raises(LockLost) as lost:
            async with asyncio.timeout(SOON), client(name):
                await asyncio.sleep(0.2)  # the first watch is there
                proxy.cut()
                await until(lambda: any(isinstance(each, NodeDown) for each in told))
                await until(lambda: isinstance(told[-1], NodeUp))
                await asyncio.sleep(0.2)  # the next one is there
                assert await other.break_lock(name)
                await asyncio.Event().wait()
        assert lost.value.reason == "broken"


async def test_c20_no_server(name: str) -> None:
    """The error says why."""
    client = Redlock("zookeeper://127.0.0.1:1/locks", patience=0.3, connect_timeout=0.2)
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
    began = time.monotonic()
    async with asyncio.timeout(SOON):
        client = Redlock(f"zookeeper://127.0.0.1:{port}/locks", connect_timeout=0.2)
        with pytest.raises(QuorumUnavailable, match="does not answer"):
            await client(name).acquire(timeout=0)
        assert time.monotonic() - began < 2.0
        await client.aclose()
    silent.close()


# -- the server ------------------------------------------------------------------------------------------------------


async def test_d4_a_server_that_starts_again_keeps_the_session(zookeepers: ZooKeepers, name: str) -> None:
    """Its log has the session and its nodes. So the lease goes on, and fences rise."""
    server = await asyncio.to_thread(zookeepers.start)
    async with client_of(server, 10.0, patience=LIMIT) as client:
        async with client(name) as lease:
            server.kill()
            server.start()
            await asyncio.to_thread(server.wait)
            async with asyncio.timeout(SOON):
                while True:
                    try:
                        await lease.extend()
                        break
                    except QuorumUnavailable:
                        await asyncio.sleep(0.05)
            assert lease.held
        async with asyncio.timeout(SOON), client(name) as again:
            assert again.fence > lease.fence


async def test_c10_a_frozen_server(zookeepers: ZooKeepers, name: str) -> None:
    """The holder stops when its lease is over, by its own clock. The client hangs up before that, also while it has
    requests to send all the time: another server could answer. Once the server runs again, so do locks."""
    server = await asyncio.to_thread(zookeepers.start)
    told: list[Event] = []

    async def ask(client: Redlock) -> None:
        while True:
            with contextlib.suppress(QuorumUnavailable):
                await client("another").locked()

    async with client_of(server, SHORT, patience=LIMIT) as client:
        client.subscribe(told.append)
        asking = [asyncio.create_task(ask(client)) for _ in range(20)]
        with pytest.raises(LockLost) as lost:
            async with client(name) as lease:
                server.freeze()
                began = time.monotonic()
                await asyncio.Event().wait()
        assert lost.value.reason == "expired"
        assert time.monotonic() - began < SHORT + 1.0
        assert any(isinstance(each, NodeDown) for each in told)
        server.thaw()
        async with asyncio.timeout(LIMIT), client(name) as again:
            assert again.fence > lease.fence
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)


async def test_a_close_does_not_wait_for_a_frozen_server(zookeepers: ZooKeepers, name: str) -> None:
    server = await asyncio.to_thread(zookeepers.start)
    client = client_of(server, SHORT)
    lease = await client(name).acquire(timeout=None)
    server.freeze()
    async with asyncio.timeout(LIMIT):
        await client.aclose()
    assert not lease.held


async def test_a_session_shorter_than_the_lease_is_refused(zookeepers: ZooKeepers, name: str) -> None:
    """The server gives less than was asked: nobody could rely on the lease."""
    server = await asyncio.to_thread(zookeepers.start, longest=SHORT)
    client = client_of(server, 10.0)
    with pytest.raises(ConfigError, match=r"sessions of 2 s at most .* session_timeout=2 .* lease=2"):
        await client(name).acquire(timeout=None)
    assert "maxSessionTimeout" in (await client.health()).reason
    await client.aclose()


# -- the client ------------------------------------------------------------------------------------------------------

HOLDS = """
import asyncio, sys
from asynclock import LockLost, Redlock

async def main(url, name):
    async with Redlock(url, lease=2.0) as redlock:
        try:
            async with redlock(name) as lease:
                print("held", lease.fence, flush=True)
                await asyncio.Event().wait()
        except LockLost as lost:
            print("lost", lost.reason, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_b3_a_client_that_is_stopped(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The session of a process that does not run expires, and another client gets the name. When the process goes on,
    it knows at once that it has lost the lock."""
    command = [sys.executable, "-c", HOLDS, shared_zookeeper.url(session_timeout=SHORT), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        held = (await asyncio.to_thread(program.stdout.readline)).split()
        os.kill(program.pid, signal.SIGSTOP)
        async with client_of(shared_zookeeper) as other, asyncio.timeout(LIMIT), other(name) as lease:
            assert lease.fence > int(held[1])
            os.kill(program.pid, signal.SIGCONT)
            assert (await asyncio.to_thread(program.stdout.readline)).split() == ["lost", "expired"]
        program.wait(LIMIT)


def gone_after(server: ZooKeeper, name: str, seconds: float, found: list[bool]) -> None:
    """Whether a name is free within that time, as another program sees it."""
    watcher = KazooClient(server.address)
    watcher.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not watcher.get_children(f"/locks/{name}"):
            found.append(True)
            break
        time.sleep(0.05)
    watcher.stop()
    watcher.close()


async def test_b1_a_blocked_loop_does_not_keep_the_name(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The threads of kazoo run on, but do not keep the session alive for a loop that does not run."""
    found: list[bool] = []
    async with client_of(shared_zookeeper, 1.0) as client:
        lease = await client(name).acquire(timeout=None)
        watching = threading.Thread(target=gone_after, args=(shared_zookeeper, name, LIMIT, found))
        watching.start()
        watching.join()  # blocks the loop
        assert found
        assert not lease.held
        async with asyncio.timeout(SOON), client(name) as again:
            assert again.fence > lease.fence


def test_a_loop_that_ended_without_a_close_keeps_nothing(shared_zookeeper: ZooKeeper, name: str) -> None:
    """Its threads would keep the session alive for as long as the process lives."""
    found: list[bool] = []
    loop = asyncio.new_event_loop()
    client = client_of(shared_zookeeper, 1.0)
    lease = loop.run_until_complete(client(name).acquire(timeout=None))
    loop.close()
    gone_after(shared_zookeeper, name, LIMIT, found)
    assert found
    assert not lease.held
