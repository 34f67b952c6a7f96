"""Many tasks of one client that use locks in ZooKeeper at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss

from asynclock import Lease, QuorumUnavailable, Redlock
from asynclock.quorum.ballot import REFUSED, WON, Ballot
from asynclock.rules.model import ACQUIRE, EXTEND, PEEK, RELEASE, Op, Queueing, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores import backlog
from asynclock.stores.backlog import SLICE
from asynclock.stores.zookeeper import ZooKeeperStore, node, pipeline
from asynclock.stores.zookeeper.connection import SessionState
from asynclock.stores.zookeeper.handler import Handler
from asynclock.stores.zookeeper.pipeline import MOST, Answer, Inbox, Requests
from tests.support.fake_clock import FakeClock
from tests.support.probes import backlog_of, nodes_of, queue_of
from tests.support.proxy import TcpProxy
from tests.support.services.zookeeper import ZooKeeper
from tests.support.waiters import LIMIT, LONG, until
from tests.support.zookeeper_clients import client_of
from tests.support.zookeeper_probes import (
    asked_by,
    change,
    connection_of,
    contenders_of,
    expire,
    held_thread,
    under_way,
    watchers_of,
)


@pytest.fixture
async def client(shared_zookeeper: ZooKeeper) -> AsyncIterator[Redlock]:
    async with client_of(shared_zookeeper) as found:
        yield found


class Clocked(ZooKeeperStore):
    """For a client whose clock the test moves."""

    def __init__(self, url: str, clock: FakeClock) -> None:
        super().__init__(url)
        self.clock = clock


@contextlib.asynccontextmanager
async def beside_a_holder(server: ZooKeeper, name: str) -> AsyncIterator[tuple[FakeClock, Redlock, Any, Lease]]:
    """A client whose clock the test moves, connected; its node; and the lease of another client that has the name."""
    clock = FakeClock()
    async with (
        Redlock(Clocked(server.url(), clock), lease=30.0, connect_timeout=LIMIT / 2) as client,
        client_of(server) as other,
        asyncio.timeout(LIMIT),
    ):
        held = await other(name).acquire(timeout=None)
        assert await client(name).locked()  # it connects
        (node_of_client,) = nodes_of(client)
        yield clock, client, node_of_client, held


async def lock_for_a_moment(client: Redlock, name: str) -> None:
    async with client(name, timeout=None):
        pass


def test_f5_a_request_never_blocks_its_loop() -> None:
    """kazoo writes a byte for each request into a pipe, whose only reader may wait for the event loop."""
    handler = Handler(1.0, 1.0, 1.0, lambda timeout, session: None, lambda: False)
    reads, writes = handler.create_socket_pair()

    def write() -> None:
        for _ in range(10_000):
            writes.send(b"\0")

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(LIMIT)
    assert not writing.is_alive()
    for _ in range(9_999):
        reads.recv(1)
        assert handler.select([reads], [], [], 0)[0] == [reads]
    reads.recv(1)
    assert not handler.select([reads], [], [], 0)[0]
    reads.recv(1)  # its request was in the queue before its byte was written
    writes.send(b"\0")
    assert not handler.select([reads], [], [], 0)[0]
    reads.close()


def test_a_thread_that_kazoo_gives_up_leaves_no_descriptors() -> None:
    """kazoo does not close what its thread may still use. The collector does, and warns of nothing."""
    handler = Handler(1.0, 1.0, 1.0, lambda timeout, session: None, lambda: False)
    gc.collect()  # what an earlier test left
    before = os.listdir("/proc/self/fd")
    reads, writes = handler.create_socket_pair()
    assert len(os.listdir("/proc/self/fd")) == len(before) + 2
    del reads, writes
    gc.collect()
    assert os.listdir("/proc/self/fd") == before


async def test_f5_few_requests_are_under_way(client: Redlock, name: str) -> None:
    """However many tasks ask, and whatever they ask. The others wait in the client, and their order stands."""
    await lock_for_a_moment(client, name)  # it connects
    with held_thread(client):
        tasks = [asyncio.create_task(lock_for_a_moment(client, f"{name}:{number}")) for number in range(600)]
        looks = [asyncio.create_task(client.inspect(name)) for _ in range(300)]
        await until(lambda: backlog_of(client) == 600 - MOST)
        assert under_way(client) == MOST
    async with asyncio.timeout(LIMIT):
        await asyncio.gather(*tasks, *looks)
    assert not contenders_of(client)


async def test_c10_an_answer_that_came_while_the_loop_was_blocked_counts(
    shared_zookeeper: ZooKeeper, name: str
) -> None:
    """The time of an acquire is over when the loop runs again, and its next request has not been sent yet."""
    clock = FakeClock()
    store = Clocked(shared_zookeeper.url(), clock)
    async with Redlock(store, lease=30.0, node_timeout=1.0, patience=0, connect_timeout=LIMIT / 2) as client:
        await lock_for_a_moment(client, name)  # it connects
        with held_thread(client):
            acquiring = asyncio.create_task(client(name).acquire(timeout=0))
            await until(lambda: under_way(client) > 0)
            clock.block(5.0)
            clock.advance(0.0)
        async with asyncio.timeout(LIMIT):
            lease = await acquiring
        assert lease
        await lease.release()


async def test_f5_renewals_and_releases_overtake_a_burst(client: Redlock, name: str) -> None:
    leases = [await client(f"{name}:{each}").acquire(timeout=None) for each in "ab"]
    with held_thread(client):
        tasks = [asyncio.create_task(lock_for_a_moment(client, f"{name}:{number}")) for number in range(3 * MOST)]
        await until(lambda: backlog_of(client) == 2 * MOST)
        first = asyncio.gather(leases[0].extend(), leases[1].release())
        await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT):
        await first
        assert not any(task.done() for task in tasks)
        await asyncio.gather(*tasks)
    await leases[0].release()


async def test_renewals_that_begin_together_share_a_sync(
    client: Redlock, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves before all of them. Later ones join the next `sync` as long as that has not left either."""
    monkeypatch.setattr(pipeline, "MOST", 5)
    leases = [await client(f"{name}:{number}").acquire(timeout=None) for number in range(8)]
    await until(lambda: watchers_of(client) == len(leases))  # it asks nothing more by itself
    with held_thread(client):
        tasks = [asyncio.create_task(lease.extend()) for lease in leases[:5]]
        await until(lambda: len(asked_by(client)) >= 6)
        for lease in leases[5:]:
            before = len(asked_by(client))
            tasks.append(asyncio.create_task(lease.extend()))
            await until(lambda before=before: len(asked_by(client)) > before)
            await asyncio.sleep(0)
        assert asked_by(client) == ["Sync", *5 * ["Exists"], "Sync", *3 * ["Exists"]]
    async with asyncio.timeout(LIMIT):
        await asyncio.gather(*tasks)
        for lease in leases:
            await lease.release()


async def test_renewals_whose_time_is_over_are_not_sent(
    shared_zookeeper: ZooKeeper, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those that wait for an earlier one of their hold, nor those that wait in the client: the next ones would
    come after them. The error of the former says so."""
    monkeypatch.setattr(pipeline, "MOST", 2)
    clock = FakeClock()
    store = Clocked(shared_zookeeper.url(), clock)
    async with Redlock(store, lease=30.0, connect_timeout=LIMIT / 2) as client, asyncio.timeout(LIMIT):
        leases = [await client(f"{name}:{each}").acquire(timeout=None) for each in "ab"]
        await until(lambda: watchers_of(client) == len(leases))
        with held_thread(client):
            sent = asyncio.create_task(leases[0].extend())
            await until(lambda: len(asked_by(client)) == 2)
            late = [asyncio.create_task(each.extend()) for each in leases]
            await until(lambda: len(asked_by(client)) == 4)
            clock.advance(3.0)
            errors = await asyncio.gather(sent, *late, return_exceptions=True)
            last = [asyncio.create_task(each.extend()) for each in leases]
            await until(lambda: len(asked_by(client)) >= 5)
            await asyncio.sleep(0)
            assert asked_by(client) == ["Sync", "Exists", "Sync", "Exists", "Exists"]
        await asyncio.gather(*last)
        says = ["did not answer", "an earlier request for the same lock, so this one was not sent", "did not answer"]
        for error, what in zip(errors, says, strict=True):
            assert isinstance(error, QuorumUnavailable)
            assert what in str(error)
        for lease in leases:
            await lease.release()


async def test_f5_what_is_given_up_is_not_sent(client: Redlock, name: str) -> None:
    """A caller whose time is over learns that its request did not leave this client. It is never sent."""
    async with client(name):
        with held_thread(client):
            tasks = [asyncio.create_task(lock_for_a_moment(client, f"{name}:{number}")) for number in range(MOST)]
            await until(lambda: under_way(client) == MOST)
            with pytest.raises(QuorumUnavailable, match="the queue of this client has 1 requests"):
                await client(f"{name}:late").acquire(timeout=0.1)
            cancelled = asyncio.create_task(client(f"{name}:cancelled").acquire())
            await until(lambda: backlog_of(client) == 1)
            cancelled.cancel()
            await asyncio.wait({cancelled})
            await until(lambda: len(contenders_of(client)) == MOST)
            assert not backlog_of(client)
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*tasks)


async def test_f5_acquires_that_begin_too_late_hold_up_no_other(
    client: Redlock, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more of them than one turn of the loop passes over, and no other op ends after them."""
    monkeypatch.setattr(backlog, "_MOST_MARGIN", 1.0)
    monkeypatch.setattr(node, "MOST", 1)
    await lock_for_a_moment(client, name)  # it connects
    queue_of(client).took(100 * LONG)  # so all are too late whose callers have a timeout
    with held_thread(client):
        first = asyncio.create_task(lock_for_a_moment(client, f"{name}:first"))
        await until(lambda: under_way(client) > 0)
        late = [asyncio.create_task(client(f"{name}:{each}").acquire(timeout=LONG)) for each in range(2 * SLICE)]
        await until(lambda: backlog_of(client) == 2 * SLICE)
        last = asyncio.create_task(lock_for_a_moment(client, f"{name}:last"))
        await until(lambda: backlog_of(client) == 2 * SLICE + 1)
    async with asyncio.timeout(LIMIT):
        await asyncio.gather(first, last)
    for each in late:
        each.cancel()
    await asyncio.wait(late)


async def test_a_renewal_that_waited_until_its_hold_ended_holds_again(
    shared_zookeeper: ZooKeeper, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter enters while its renewal waits in the queue of the client, and the hold ends before that begins. The
    renewal is a new attempt: what it gets is kept when the connection comes back."""
    async with beside_a_holder(shared_zookeeper, name) as (clock, client, node_of_client, held):

        def ask(verb: Verb, number: int = 0) -> Ballot:
            op = Op(verb, MUTEX, name, f"{1:032x}|", 30.0, queueing=Queueing(number=number))
            ballot = Ballot(op, 1, clock.now(), clock.now() + LONG)
            node_of_client.send(op, ballot)
            return ballot

        first = ask(ACQUIRE, 1)
        await until(lambda: first.outcome is REFUSED)
        with monkeypatch.context() as patched:
            patched.setattr(node, "MOST", 0)
            renewal = ask(ACQUIRE, 2)
            await held.release()
            await until(lambda: not contenders_of(client))  # it is granted
            clock.advance(31.0)
            await until(lambda: contenders_of(client))
        queue_of(client).begin_more()
        await until(lambda: renewal.outcome is WON)
        change(client, SessionState.CONNECTED)
        extend, release = ask(EXTEND), ask(RELEASE)
        await until(lambda: release.outcome is not None)
        assert extend.outcome is WON


@pytest.mark.parametrize("how", ["while it waits", "before it was sent"])
async def test_f5_a_waiter_that_was_granted_learns_it_before_others_ask(
    shared_zookeeper: ZooKeeper, name: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its renewal waits in the queue of the client, and its owner for the answer: nobody works under the hold
    meanwhile. It begins first, also if its owner gives up soon."""
    order: list[int] = []
    async with beside_a_holder(shared_zookeeper, name) as (clock, client, node_of_client, held):

        def ask(verb: Verb, id: int, number: int = 0) -> Ballot:
            op = Op(verb, MUTEX, name, f"{id:032x}|", 30.0, queueing=Queueing(number=number))
            ballot = Ballot(op, 1, clock.now(), clock.now() + LONG, gives_up=clock.now() + 10.0)
            ballot.when_settled(lambda _: order.append(id))
            node_of_client.send(op, ballot)
            return ballot

        async def granted() -> None:
            await held.release()
            await until(lambda: not contenders_of(client))

        first = ask(ACQUIRE, 1, number=1)
        await until(lambda: first.outcome is REFUSED)
        if how == "before it was sent":
            await granted()
        with monkeypatch.context() as patched:
            patched.setattr(node, "MOST", 0)
            looks = [ask(PEEK, other_id) for other_id in range(2, 12)]
            renewal = ask(ACQUIRE, 1, number=2)
            if how == "while it waits":
                await granted()
        queue_of(client).took(100 * LONG)  # the usual time of an acquire
        clock.advance(6.0)
        monkeypatch.setattr(node, "MOST", 1)
        queue_of(client).begin_more()
        await until(lambda: all(each.outcome is not None for each in [*looks, renewal]))
        assert renewal.outcome is WON
        assert order == [1, 1, *range(2, 12)]
        release = ask(RELEASE, 1)
        await until(lambda: release.outcome is not None)


async def test_f5_all_requests_fail_with_the_connection(zookeeper_proxy: TcpProxy) -> None:
    """Also those that were not sent: kazoo would keep them until it is connected again."""
    url = f"zookeeper://127.0.0.1:{zookeeper_proxy.port}/locks?session_timeout=30"
    async with Redlock(url, lease=30.0) as client:
        connection = connection_of(client)
        zookeeper_proxy.hold_replies()
        asked = [asyncio.create_task(connection.exists("/locks")) for _ in range(3 * MOST)]
        await until(lambda: under_way(client) == MOST)
        zookeeper_proxy.away = True
        zookeeper_proxy.cut()
        async with asyncio.timeout(LIMIT):
            errors = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(each) for each in errors} == {ConnectionLoss}


async def test_f5_a_request_that_cannot_be_sent_takes_no_place() -> None:
    """It fails, and so do those after it: there are more than may be under way."""

    def send(request: object, answer: Answer) -> None:
        raise RuntimeError("no")

    loop = asyncio.get_running_loop()
    requests = Requests(loop, Inbox(loop, lambda: None), send)
    asked = [requests.ask(number) for number in range(2 * MOST)]
    async with asyncio.timeout(LIMIT):
        errors = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(each) for each in errors} == {RuntimeError}


@pytest.mark.timeout(180)
async def test_f5_a_burst_of_acquires_is_served(shared_zookeeper: ZooKeeper, name: str) -> None:
    """3,000 tasks, each with a new name. The leases that are held meanwhile are kept, and the loop turns: no turn has
    half a second of work. One that gets no answer in time, on a busy machine, waits once more behind the others."""
    longest = 0.0

    async def turn() -> None:
        nonlocal longest
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.01)
            longest = max(longest, time.thread_time() - began)

    async with client_of(shared_zookeeper, 12.0, node_timeout=4.0, patience=2 * LONG) as client:
        held = [await client(f"{name}:held:{number}").acquire(timeout=None) for number in range(30)]
        tasks = [asyncio.create_task(lock_for_a_moment(client, f"{name}:{number}")) for number in range(3_000)]
        await asyncio.sleep(0)  # all of them begin in one turn
        turning = asyncio.create_task(turn())
        await asyncio.gather(*tasks)
        turning.cancel()
        assert all(lease.held for lease in held)
        for lease in held:
            await lease.release()
    assert longest < 0.5


async def test_many_that_watch_one_node(client: Redlock, name: str) -> None:
    """As readers do that wait for one writer. Some of them look again in each turn of the loop."""
    async with client(name):
        connection, fired = connection_of(client), list[int]()
        path, _ = await connection.create(f"/locks/{name}/another-", b"")
        watchers = [partial(fired.append, number) for number in range(3 * SLICE)]
        for each in watchers:
            assert await connection.watch(path, each)
        deleting, most = asyncio.create_task(connection.delete(path)), 0
        async with asyncio.timeout(LIMIT):
            while len(fired) < len(watchers):
                before = len(fired)
                await asyncio.sleep(0)
                most = max(most, len(fired) - before)
        assert await deleting
        assert most <= SLICE


async def test_many_holds_after_a_reconnect(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The client looks whether their nodes are there, some in each turn of the loop."""
    async with client_of(shared_zookeeper) as client:
        held = [await client(f"{name}:{number}").acquire(timeout=None) for number in range(300)]
        before = len(asyncio.all_tasks())
        change(client, SessionState.CONNECTED)
        assert len(asyncio.all_tasks()) - before <= 2 * SLICE
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*(lease.extend() for lease in held))
            await asyncio.gather(*(lease.release() for lease in held))


async def test_many_holds_of_an_expired_session(
    shared_zookeeper: ZooKeeper, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of them are lost in each turn of the loop. Until all are, the next session does not count as connected: a
    hold of the expired one must not be found in it."""
    monkeypatch.setattr(pipeline, "SLICE", 3)
    async with client_of(shared_zookeeper) as client:
        (node_of_client,) = nodes_of(client)
        leases = [await client(f"{name}:{number}").acquire(timeout=None) for number in range(10)]
        expire(client)
        change(client, SessionState.CONNECTING)
        change(client, SessionState.CONNECTED)
        lost = [sum(not lease.held for lease in leases)]
        while node_of_client.error is not None:
            await asyncio.sleep(0)
            lost.append(sum(not lease.held for lease in leases))
        assert lost == [3, 6, 9, 10]
