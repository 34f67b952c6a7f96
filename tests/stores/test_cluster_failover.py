"""A cluster whose masters fail while names are held and waited for. Real servers, which the tests kill and freeze."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from asynclock import Lease, QuorumUnavailable, Redlock
from asynclock.events import Event, NodeDown, NodeUp
from asynclock.stores.redis.keys import slot_of
from tests.support.closing_probes import is_cut, timer_of
from tests.support.commands import answered, json_of
from tests.support.probes import (
    acquisitions_of,
    connection_of,
    nodes_of,
    unanswered,
    waits_for_notice,
    without_slots_from_now,
)
from tests.support.services.cluster import Cluster, Member, wait_until
from tests.support.still_clock import turns
from tests.support.told import told
from tests.support.waiters import LIMIT, PATIENT, healthy, until

PREFIX = "lock:"

LASTING: Any = {**PATIENT, "lease": 600.0, "max_lease": 600.0, "patience": 2 * LIMIT}
"""No lease ends, and no ticket is renewed, while a test waits. A failover takes seconds, and more on a busy machine."""


@pytest.fixture(scope="module")
def six() -> Iterator[Cluster]:
    cluster = Cluster(3, 1, "--cluster-node-timeout", "2000").ready()  # a busy machine is no reason for a failover
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(six: Cluster) -> Cluster:
    """Three masters with a replica each, without the holds that the tests before have left at a master that died."""
    six.heal()
    for each in six.masters:
        each.cli("FLUSHALL")
    return six


@pytest.fixture
async def redlock(cluster: Cluster) -> AsyncIterator[Redlock]:
    async with Redlock(cluster.all_urls, **LASTING) as client:
        yield client


@pytest.fixture
async def other(cluster: Cluster) -> AsyncIterator[Redlock]:
    async with Redlock(cluster.all_urls, **LASTING) as client:
        yield client


async def test_a_close_over_a_silent_master_leaves_nothing(cluster: Cluster, name: str) -> None:
    """It has a release to answer, and its time for that is long."""
    client = Redlock(cluster.all_urls, **{**LASTING, "node_timeout": LIMIT})
    lease = await client(name).acquire()
    assert lease is not None
    await healthy(client)
    (node,) = nodes_of(client)
    master = cluster.owner(slot_of(PREFIX, name))
    connections = [connection_of(shard) for shard in node.shards]
    master.freeze()
    try:
        releasing = asyncio.create_task(lease.release())
        await turns()
        async with asyncio.timeout(LIMIT):
            await client.aclose()
        await turns()
        assert all(map(is_cut, connections))
        await asyncio.gather(releasing, return_exceptions=True)
    finally:
        master.thaw()
        await client.aclose()


async def test_a_close_that_is_cancelled_cuts_all_masters(cluster: Cluster, name: str) -> None:
    """As the time limit of a close does it."""
    client = Redlock(cluster.all_urls, **{**LASTING, "node_timeout": LIMIT})
    lease = await client(name).acquire()
    assert lease is not None
    await healthy(client)
    (node,) = nodes_of(client)
    master = cluster.owner(slot_of(PREFIX, name))
    connections = [connection_of(shard) for shard in node.shards]
    master.freeze()
    try:
        releasing = asyncio.create_task(lease.release())
        await turns()
        closing = asyncio.create_task(node.aclose())
        await turns()
        assert not closing.done()
        closing.cancel()
        await asyncio.wait({closing}, timeout=LIMIT)
        await turns()
        assert closing.cancelled()
        assert all(map(is_cut, connections))
        assert not any(map(timer_of, node.shards))
        await asyncio.gather(releasing, return_exceptions=True)
    finally:
        master.thaw()
        await client.aclose()


async def held(client: Redlock, name: str, cluster: Cluster) -> tuple[Lease, Member]:
    """A lease that the replica knows as well, and the master of its slot."""
    lease = await client(name).acquire()
    assert lease
    master = cluster.owner(slot_of(PREFIX, name))
    key, replica = (PREFIX + name).encode(), cluster.replica_of(master)
    await asyncio.to_thread(
        wait_until, lambda: key in replica.cli("CLUSTER", "GETKEYSINSLOT", slot_of(PREFIX, name), 9), "it is replicated"
    )
    return lease, master


async def kill(cluster: Cluster, master: Member) -> None:
    master.kill()


async def freeze(cluster: Cluster, master: Member) -> None:
    master.freeze()


async def take_over(cluster: Cluster, master: Member) -> None:
    await asyncio.to_thread(cluster.promote, cluster.replica_of(master))


async def work(client: Redlock, name: str, inside: list[int]) -> None:
    async with client(name) as lease:
        inside.append(lease.fence)
        await asyncio.sleep(0)


@pytest.mark.parametrize("fail", [kill, freeze, take_over])
async def test_a_master_fails(
    cluster: Cluster, redlock: Redlock, other: Redlock, name: str, fail: Callable[..., object]
) -> None:
    """A lock is held and 100 tasks wait as its master is killed, frozen, or gives its slots to its replica. The hold
    lives on there, and the waiters are served by the new master, and not when their tickets would be renewed."""
    lease, master = await held(redlock, name, cluster)
    inside: list[int] = []
    replica = cluster.replica_of(master)
    async with asyncio.timeout(2 * LIMIT), asyncio.TaskGroup() as group:
        for _ in range(50):
            group.create_task(work(redlock, name, inside))
            group.create_task(work(other, name, inside))
        await until(lambda: all(any(map(waits_for_notice, acquisitions_of(each))) for each in (redlock, other)))
        await fail(cluster, master)  # type: ignore[misc]
        await asyncio.to_thread(wait_until, lambda: replica.role == "master", "a failover")
        await until_extended(lease)
        assert lease.held
        await lease.release()
    assert len(inside) == 100
    assert inside == sorted(set(inside))
    assert inside[0] > lease.fence


async def until_extended(lease: Lease) -> None:
    """Return once the new master has extended it."""
    async with asyncio.timeout(LIMIT):
        while True:
            try:
                await lease.extend()
            except QuorumUnavailable:
                await asyncio.sleep(0.05)
            else:
                return


async def test_an_old_master_counts_for_nothing(cluster: Cluster, redlock: Redlock, other: Redlock, name: str) -> None:
    """It was frozen while its replica took over. When it goes on, it has the old hold still, and nobody asks it."""
    lease, master = await held(redlock, name, cluster)
    replica = cluster.replica_of(master)
    master.freeze()
    await asyncio.to_thread(wait_until, lambda: replica.role == "master", "a failover")
    await until_extended(lease)
    await lease.release()
    mine = await other(name).acquire(timeout=LIMIT)
    assert mine
    master.thaw()
    await asyncio.to_thread(wait_until, lambda: master.role == "slave", "the old master follows the new one")
    await until_extended(mine)
    assert await redlock(name).acquire(timeout=0) is None
    await mine.release()
    got = await redlock(name).acquire(timeout=LIMIT)
    assert got
    assert got.fence > mine.fence > lease.fence
    await got.release()


async def test_f7_a_release_outlives_the_failover(
    cluster: Cluster, redlock: Redlock, other: Redlock, name: str
) -> None:
    """A lock is released while its master is down. The release is delivered to the new master: the lease would not end
    while this test waits."""
    lease, master = await held(redlock, name, cluster)
    master.kill()
    await lease.release()
    got = await other(name).acquire(timeout=LIMIT)
    assert got
    await got.release()


async def test_a_failover_after_the_program_has_cancelled_all_tasks(
    cluster: Cluster, redlock: Redlock, name: str
) -> None:
    """As asyncio.run does after Ctrl-C, in a program that goes on. The master was down already, and the client waited
    for another one. It finds the new master all the same."""
    lease, master = await held(redlock, name, cluster)
    await lease.release()
    replica = cluster.replica_of(master)
    try:
        replica.cli("CONFIG", "SET", "cluster-replica-no-failover", "yes")
        with told(redlock) as seen:
            master.kill()
            await until(lambda: seen.of(NodeDown))
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.to_thread(cluster.promote, replica, "TAKEOVER")
        got = await redlock(name).acquire(timeout=LIMIT)
        assert got
        await got.release()
    finally:
        replica.cli("CONFIG", "SET", "cluster-replica-no-failover", "no")


@pytest.mark.parametrize("dies", [True, False])
async def test_f7_a_release_in_flight_to_a_master_that_lost_its_slots(
    cluster: Cluster, redlock: Redlock, other: Redlock, name: str, dies: bool
) -> None:
    """The client closes the connection to that master, which dies, or stands still, before it has answered. The release
    goes to the master of the slot."""
    lease, master = await held(redlock, name, cluster)
    (node,) = nodes_of(redlock)
    (shard,) = [each for each in node.shards if each.address.port == master.port]
    master.freeze()
    releasing = asyncio.create_task(lease.release())
    await until(lambda: unanswered(connection_of(shard)))
    without_slots_from_now(node, shard)
    if dies:
        master.kill()
    await releasing
    got = await other(name).acquire(timeout=LIMIT)
    assert got
    await got.release()


async def test_f21_a_release_that_the_takeover_lost(
    cluster: Cluster, redlock: Redlock, other: Redlock, name: str
) -> None:
    """A replica without a link to its master takes over. It has the hold, and lacks its release, which the old master
    had acknowledged. It gets the release again: the lease would not end while this test waits."""
    lease, master = await held(redlock, name, cluster)
    assert await other(name).acquire(timeout=0) is None
    replica = cluster.replica_of(master)
    try:
        replica.cli("CONFIG", "SET", "masteruser", "nobody", "masterauth", "wrong")
        master.cli("CLIENT", "KILL", "TYPE", "replica")
        await asyncio.to_thread(
            wait_until, lambda: replica.info("replication")["master_link_status"] == "down", "the link is down"
        )
        await lease.release()
        await asyncio.to_thread(cluster.promote, replica, "TAKEOVER")
        await asyncio.to_thread(wait_until, lambda: master.role == "slave", "the old master follows the new one")
        got = await other(name).acquire(timeout=LIMIT)
        assert got
        await got.release()
    finally:
        replica.cli("CONFIG", "SET", "masteruser", "", "masterauth", "")


async def listed_at_other_masters(client: Redlock, cluster: Cluster, names: list[str], dead: Member) -> None:
    """`holders`, `ls` and `top` show the holds that the other masters have, and the error."""
    found: set[str] = set()
    async with client(names[0]), client(names[1]):
        with pytest.raises(QuorumUnavailable, match=dead.address):
            async for each in client.holders():
                found.add(each.name)
        url = "--url", cluster.all_urls
        ls = await asyncio.to_thread(answered, "ls", *url)
        top = await asyncio.to_thread(answered, "top", "--iterations", "1", *url)
        as_json = await asyncio.to_thread(answered, "ls", "--json", *url)
    assert found == set(names)
    assert (ls.returncode, top.returncode, as_json.returncode) == (69, 69, 69)
    assert {each["name"] for each in json_of(as_json)} == set(names)
    for shown in (ls.stdout, top.stdout):
        assert all(f"\n{name} " in shown for name in names)
    assert "2 holds known" in top.stdout
    assert dead.address in top.stdout
    assert dead.address in ls.stderr


async def test_names_at_other_masters(cluster: Cluster, redlock: Redlock, name: str) -> None:
    """A master without a replica is killed. Names in its slots cannot be locked, and the error says which; other names
    can. Health and events say it, too."""
    dead = cluster.owner(0)
    for each in cluster.members:
        each.cli("CONFIG", "SET", "cluster-require-full-coverage", "no")
    told: list[Event] = []
    redlock.subscribe(told.append)
    await healthy(redlock)
    names = {cluster.owner(slot_of(PREFIX, f"{name}{n}")): f"{name}{n}" for n in range(50)}
    cluster.replica_of(dead).kill()
    dead.kill()
    async with asyncio.timeout(LIMIT):
        while not any(isinstance(each, NodeDown) for each in told):
            await asyncio.sleep(0.01)
    for member in {*names} - {dead}:
        async with redlock(names[member], timeout=LIMIT):
            pass
    with pytest.raises(QuorumUnavailable, match=dead.address):
        await redlock(names[dead]).acquire(timeout=1)
    async with asyncio.timeout(LIMIT):
        while not (health := await redlock.health()).ok:
            await asyncio.sleep(0.01)
    assert f"slots {0}-{math.ceil(16384 / 3) - 2}: " in health.nodes[0].error
    await listed_at_other_masters(redlock, cluster, [names[each] for each in {*names} - {dead}], dead)
    dead.start()
    async with asyncio.timeout(LIMIT):
        while not isinstance(told[-1], NodeUp):
            await asyncio.sleep(0.01)
    async with redlock(names[dead], timeout=LIMIT):
        pass
