"""Locks over an ensemble of three ZooKeeper servers, of which one is killed or frozen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from asynclock import QuorumUnavailable, Redlock
from tests.support.services.zookeeper import ZooKeeper, ZooKeepers, url_of
from tests.support.waiters import LIMIT
from tests.support.zookeeper_probes import zookeeper_port

SESSION = 10.0


@pytest.fixture
def three() -> Iterator[list[ZooKeeper]]:
    pool = ZooKeepers()
    yield pool.ensemble()
    pool.stop()


@pytest.mark.timeout(240)
async def test_c19_one_of_three_fails(three: list[ZooKeeper], name: str) -> None:
    """The server of the holder is frozen, and later the leader is killed, while a lock is held and twenty tasks wait.
    The lease is kept, all tasks are served, one at a time, and the fencing tokens rise."""
    await one_fails(three, f"{name}:frozen", "frozen")
    for each in three:
        each.thaw()
    async with asyncio.timeout(LIMIT):  # one that was the leader when it was frozen says so for a moment
        while sorted(each.mode() for each in three) != ["follower", "follower", "leader"]:
            await asyncio.sleep(0.05)
    await one_fails(three, f"{name}:killed", "killed")


async def one_fails(three: list[ZooKeeper], name: str, how: str) -> None:
    session = SESSION if how == "killed" else 1.5 * SESSION  # kazoo leaves a silent server after two thirds of it
    url = url_of(three, session_timeout=session)
    clients = [
        Redlock(url, lease=session, patience=LIMIT, node_timeout=2.0, connect_timeout=LIMIT / 2) for _ in range(3)
    ]
    fences: list[int] = []
    inside = 0

    async def work(client: Redlock) -> None:
        nonlocal inside
        async with client(name, fair=True) as lease:
            inside += 1
            assert inside == 1
            fences.append(lease.fence)
            await asyncio.sleep(0.01)
            assert lease.held
            inside -= 1

    async with clients[0], clients[1], clients[2]:
        lease = await clients[0](name).acquire(timeout=None)
        tasks = [asyncio.create_task(work(clients[number % 3])) for number in range(20)]
        async with asyncio.timeout(LIMIT):
            while len((await clients[0].inspect(name)).waiters) < 1:
                await asyncio.sleep(0.01)
        if how == "killed":
            next(each for each in three if each.mode() == "leader").kill()
        else:
            next(each for each in three if each.port == zookeeper_port(clients[0])).freeze()
        held_until = time.monotonic() + session * (0.3 if how == "killed" else 1.2)
        while time.monotonic() < held_until:
            assert lease.held
            await asyncio.sleep(0.05)
        await lease.release()
        async with asyncio.timeout(2 * LIMIT):
            await asyncio.gather(*tasks)
        assert fences == sorted(set(fences))
        assert len(fences) == 20
        assert fences[0] > lease.fence


@pytest.fixture
def two() -> Iterator[list[ZooKeeper]]:
    pool = ZooKeepers()
    yield pool.ensemble(2, read_only=True)
    pool.stop()


async def test_a_server_in_read_only_mode_is_no_working_node(two: list[ZooKeeper], name: str) -> None:
    """It has lost its quorum, and would still answer reads. It grants nothing, also to a client that begins meanwhile;
    the error says why. Once the quorum is back, the lease of before is still held, and names are granted again."""
    url = url_of(two, session_timeout=LIMIT)
    async with Redlock(url, lease=LIMIT, patience=LIMIT, connect_timeout=LIMIT / 2) as client:
        lease = await client(name).acquire(timeout=None)
        two[1].kill()
        async with asyncio.timeout(LIMIT):
            while two[0].mode() != "read-only":
                await asyncio.sleep(0.05)
        with pytest.raises(QuorumUnavailable):
            await client(f"{name}:2").acquire(timeout=0)
        async with aclosing(Redlock(url, lease=LIMIT, patience=0, connect_timeout=1.0)) as late, asyncio.timeout(LIMIT):
            with pytest.raises(QuorumUnavailable):
                await late(name).acquire(timeout=0)
            said = ""
            while not ("its ensemble may have no quorum" in said and f"{two[1].port}: Connection refused" in said):
                said = (await late.health()).reason
                await asyncio.sleep(0.05)
        assert not (await client.health()).ok
        two[1].start()
        async with asyncio.timeout(LIMIT):
            while not (await client.health()).ok:
                await asyncio.sleep(0.05)
        assert lease.held
        async with client(f"{name}:2", timeout=LIMIT) as after:
            assert after.fence > lease.fence
        await lease.release()


@pytest.fixture
def pair() -> Iterator[list[ZooKeeper]]:
    pool = ZooKeepers()
    yield pool.ensemble(2)
    pool.stop()


async def test_a_follower_without_its_leader_renews_nothing(pair: list[ZooKeeper], name: str) -> None:
    """It still answers reads until its `syncLimit` is over. A leader that it cannot reach may end the session
    meanwhile, and another client may enter: so what the follower alone says extends no lease, also of several that are
    renewed together."""
    leader, follower = sorted(pair, key=lambda each: each.mode() != "leader")
    assert (leader.mode(), follower.mode()) == ("leader", "follower")
    url = url_of([follower], session_timeout=LIMIT)
    async with Redlock(url, lease=LIMIT, patience=LIMIT, node_timeout=1.0, connect_timeout=LIMIT / 2) as client:
        leases = [await client(f"{name}:{number}").acquire(timeout=None) for number in range(3)]
        leader.freeze()
        errors = await asyncio.gather(*(lease.extend() for lease in leases), return_exceptions=True)
        assert {type(each) for each in errors} == {QuorumUnavailable}
        leader.thaw()
        async with asyncio.timeout(LIMIT):
            for lease in leases:
                await lease.release()
