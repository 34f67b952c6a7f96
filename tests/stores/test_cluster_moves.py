"""A cluster whose slots move while their names are held and waited for. Real servers; the slots move as
`redis-cli --cluster reshard` moves them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from asynclock import Lease, QuorumUnavailable, Redlock
from asynclock.events import NodeDown, NodeUp
from asynclock.stores.redis.keys import keys, slot_of
from tests.support.probes import acquisitions_of, nodes_of, ping, without_questions_for_slots
from tests.support.services.cluster import Cluster, Member
from tests.support.told import told
from tests.support.waiters import LIMIT, LONG, PATIENT, healthy, until

PREFIX = "lock:"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three masters without replicas. The tests leave all slots covered."""
    cluster = Cluster(3, 0, "--cluster-node-timeout", "15000").ready()
    yield cluster
    cluster.stop()


@pytest.fixture
async def redlock(cluster: Cluster) -> AsyncIterator[Redlock]:
    async with Redlock(cluster.url, **PATIENT) as client:
        yield client


@pytest.fixture
async def other(cluster: Cluster) -> AsyncIterator[Redlock]:
    async with Redlock(cluster.url, **PATIENT) as client:
        yield client


def another(cluster: Cluster, slot: int) -> Member:
    """A master that does not have the slot."""
    owner = cluster.owner(slot)
    return next(each for each in cluster.masters if each is not owner)


def held_at(member: Member, name: str) -> bool:
    """Whether that server has a hold of the name, whatever it says to clients."""
    slot = slot_of(PREFIX, name)
    return (PREFIX + name).encode() in member.cli("CLUSTER", "GETKEYSINSLOT", slot, 1000)


async def test_a_held_name_moves(cluster: Cluster, redlock: Redlock, other: Redlock, name: str) -> None:
    """The hold moves with its slot: it is extended and released at the new master, and the token still rises."""
    lease = await redlock(name).acquire()
    assert lease
    to = another(cluster, slot_of(PREFIX, name))
    await asyncio.to_thread(cluster.move, slot_of(PREFIX, name), to)
    assert held_at(to, name)
    await lease.extend()
    assert await other(name).acquire(timeout=0) is None
    await lease.release()
    assert not held_at(to, name)
    async with other(name) as later:
        assert later.fence > lease.fence


async def test_waiters_move(cluster: Cluster, name: str) -> None:
    """Tasks wait while the slot moves. They enter one after the other soon after the release, not when their tickets
    are renewed: with this lease after 160 s."""
    inside: list[int] = []

    async def work(client: Redlock) -> None:
        async with client(name, lease=600.0) as lease:
            inside.append(lease.fence)
            await asyncio.sleep(0)

    options: Any = {"max_lease": 600.0, **PATIENT}
    async with (
        Redlock(cluster.url, **options) as redlock,
        Redlock(cluster.url, **options) as other,
        Redlock(cluster.url, **options) as holder,
    ):
        lease = await holder(name).acquire()
        assert lease
        waiting = [asyncio.create_task(work(client)) for client in [redlock, other] * 10]
        await waiters(holder, name, 2)
        to = another(cluster, slot_of(PREFIX, name))
        await asyncio.to_thread(cluster.move, slot_of(PREFIX, name), to)
        await lease.release()
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*waiting)
    assert inside == sorted(set(inside))
    assert len(inside) == 20


async def waiters(client: Redlock, name: str, count: int) -> None:
    """Return once so many tasks wait, as far as the servers know."""
    async with asyncio.timeout(LIMIT):
        while sum(each.tasks for each in (await client.inspect(name)).waiters) < count:
            await asyncio.sleep(0.005)


async def test_tryagain_while_a_slot_moves(cluster: Cluster, redlock: Redlock, name: str) -> None:
    """While a slot moves, no master has all keys of a name. Ops wait, and are carried out within their deadline."""
    slot = slot_of(PREFIX, name)
    to = another(cluster, slot)
    lease = await redlock(name).acquire()
    assert lease
    source = await asyncio.to_thread(cluster.begin_move, slot, to)
    await asyncio.to_thread(cluster.move_keys, slot, source, to)
    before = cluster.refusals("TRYAGAIN")
    extending = asyncio.create_task(lease.extend())
    await cluster.refused("TRYAGAIN", before)
    assert not extending.done()
    await asyncio.to_thread(cluster.end_move, slot, to)
    async with asyncio.timeout(LIMIT):
        await extending
        await lease.release()
    assert not held_at(to, name)


async def test_ask_for_one_key(cluster: Cluster, redlock: Redlock, name: str) -> None:
    """An op of a single key is carried out by the new master while the slot still moves."""
    slot = slot_of(PREFIX, name)
    to = another(cluster, slot)
    source = await asyncio.to_thread(cluster.begin_move, slot, to)
    lease = await redlock(name, fencing=False).acquire(timeout=LIMIT)
    assert lease
    assert held_at(to, name)
    assert not held_at(source, name)
    await asyncio.to_thread(cluster.end_move, slot, to)
    await lease.release()
    assert not held_at(to, name)


async def test_two_masters_that_send_an_op_to_each_other(cluster: Cluster, redlock: Redlock, name: str) -> None:
    """A move was given up at one side only: the owner of the slot sends clients on with ASK, and the other master sends
    them back with MOVED. The op is sent again after pauses, within its time."""
    slot = slot_of(PREFIX, name)
    to = another(cluster, slot)
    await redlock.health()
    source, before = await asyncio.to_thread(cluster.begin_move, slot, to), calls_of(to, "asking")
    to.cli("CLUSTER", "SETSLOT", slot, "STABLE")
    with pytest.raises(QuorumUnavailable):
        await redlock(name).acquire(timeout=1)
    assert 0 < calls_of(to, "asking") - before < 150
    source.cli("CLUSTER", "SETSLOT", slot, "STABLE")
    async with redlock(name):
        pass


def calls_of(member: Member, command: str) -> int:
    """How many times that server has carried out a command."""
    return int(re.findall(r"calls=(\d+)", member.info("commandstats").get(f"cmdstat_{command}", "calls=0"))[0])


async def test_c16_an_acquire_that_was_undone_is_not_sent_again(cluster: Cluster, name: str) -> None:
    """The acquire waits for its slot and is cancelled. When the slot is there, only the undo is carried out: the name
    has no key, not even the counter that an acquire leaves."""
    slot = slot_of(PREFIX, name)
    to = another(cluster, slot)
    async with Redlock(cluster.url, **PATIENT) as client:
        source, before = await asyncio.to_thread(cluster.begin_move, slot, to), cluster.refusals("TRYAGAIN")
        waiting = asyncio.create_task(client(name).acquire())
        await cluster.refused("TRYAGAIN", before)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.to_thread(cluster.move_keys, slot, source, to)
        await asyncio.to_thread(cluster.end_move, slot, to)
        await ping(nodes_of(client)[0])
    assert not {key.encode() for key in keys(PREFIX, name)} & set(to.cli("CLUSTER", "GETKEYSINSLOT", slot, 100))


async def test_a_release_while_a_slot_moves(
    cluster: Cluster, other: Redlock, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not lost, although the client closes: it waits for the slot. It does so between two attempts, and while the
    answer to one is on its way. On a busy machine a slot may need more than the 3 s that a release waits."""
    monkeypatch.setattr("asynclock.protocol.hold.RELEASE_TIMEOUT", LIMIT)
    monkeypatch.setattr("asynclock.stores.redis.cluster.node._FAREWELL", LIMIT)
    slot = slot_of(PREFIX, name)
    to = another(cluster, slot)
    async with Redlock(cluster.url, **PATIENT) as client:
        lease = await client(name).acquire()
        assert lease
        source = await asyncio.to_thread(cluster.begin_move, slot, to)
        await asyncio.to_thread(cluster.move_keys, slot, source, to)
        before = cluster.refusals("TRYAGAIN")
        releasing = asyncio.create_task(lease.release())
        await cluster.refused("TRYAGAIN", before)
        end = asyncio.create_task(asyncio.to_thread(cluster.end_move, slot, to))
    await asyncio.gather(releasing, end)
    taken = await other(name).acquire(timeout=0)
    assert taken
    await taken.release()


async def test_work_goes_on_while_slots_move(cluster: Cluster, name: str) -> None:
    """30 tasks of three clients work on names of one slot, which moves eight times. Never two hold a name, the tokens
    rise, no notice is lost (a ticket is renewed after 160 s at the soonest), and nothing is left."""
    names = [f"{{{name}}}{letter}" for letter in "abc"]
    slot = slot_of(PREFIX, names[0])
    held: set[str] = set()
    fences: dict[str, int] = {}
    done = asyncio.Event()
    entered = 0

    async def work(client: Redlock, names: list[str]) -> None:
        nonlocal entered
        while not done.is_set():
            for each in names:
                async with client(each, timeout=None) as lease:
                    assert each not in held
                    assert lease.fence > fences.get(each, 0)
                    held.add(each)
                    fences[each] = lease.fence
                    await asyncio.sleep(0)
                    held.remove(each)
                    entered += 1

    long: Any = {"lease": 600.0, "max_lease": 600.0, **PATIENT}
    clients = [Redlock(cluster.url, **long) for _ in range(3)]
    async with asyncio.timeout(2 * LIMIT), clients[0], clients[1], clients[2], asyncio.TaskGroup() as group:
        for number in range(30):
            group.create_task(work(clients[number % 3], names[number % 3 :] + names[: number % 3]))
        for _ in range(8):
            seen = entered
            while entered < seen + 10:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(cluster.move, slot, another(cluster, slot))
        done.set()
    left = cluster.owner(slot).cli("CLUSTER", "GETKEYSINSLOT", slot, 1000)
    assert [key for key in left if not key.endswith(b"fence")] == []


async def test_a_node_is_added(cluster: Cluster, redlock: Redlock, other: Redlock, name: str) -> None:
    """Slots move to a master that no client knows yet."""
    lease = await redlock(name).acquire()
    assert lease
    waiting = asyncio.create_task(other(name).acquire(timeout=LIMIT))
    await waiters(redlock, name, 1)
    new = await asyncio.to_thread(cluster.add_master)
    slot, owner = slot_of(PREFIX, name), cluster.owner(slot_of(PREFIX, name))
    await asyncio.to_thread(cluster.move, slot, new)
    await lease.extend()
    await lease.release()
    got = await waiting
    assert got
    assert held_at(new, name)
    await got.release()
    await asyncio.to_thread(cluster.move, slot, owner)


async def test_f15_a_master_that_was_removed_is_no_outage(
    cluster: Cluster, redlock: Redlock, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Scale-in: its slots went to the others before it was shut down. The client is told nothing, and has not asked for
    the slots since. An acquire with timeout=0 gets the name from the new master."""
    slot, new = slot_of(PREFIX, name), await asyncio.to_thread(cluster.add_master)
    owner = cluster.owner(slot)
    await asyncio.to_thread(cluster.move, slot, new)
    (node,) = nodes_of(redlock)
    with without_questions_for_slots(node):
        async with redlock(name):
            assert held_at(new, name)
        await asyncio.to_thread(cluster.move, slot, owner)
        for each in cluster.up():
            if each is not new:
                each.cli("CLUSTER", "FORGET", new.id)
    with told(redlock) as seen:
        (shard,) = [each for each in node.shards if each.address.port == new.port]
        new.kill()
        await until(lambda: not shard.up)
        lease = await redlock(name).acquire(timeout=0)
        assert lease
        await lease.release()
        await until(lambda: not shard.reconnecting)  # an attempt to connect has failed
        await healthy(redlock)
    assert seen.of(NodeDown) == seen.of(NodeUp) == []
    assert "is down" not in caplog.text


async def test_c12_clusterdown(cluster: Cluster, redlock: Redlock, name: str) -> None:
    """A slot that no master has makes the whole cluster refuse commands, by its usual setting. An acquire goes on when
    the slot is back; before that, the error says why."""
    slot = slot_of(PREFIX, name)
    await redlock.health()
    owner = cluster.drop(slot)
    with pytest.raises(QuorumUnavailable, match=r"CLUSTERDOWN|no master has slot"):
        await redlock(name).acquire(timeout=1)
    async with asyncio.timeout(LIMIT):
        while f"slots {slot}: no master has them" not in (await redlock.health()).reason:
            await asyncio.sleep(0.01)
    waiting = asyncio.create_task(redlock(name).acquire(timeout=LIMIT))
    await until(lambda: acquisitions_of(redlock))
    owner.cli("CLUSTER", "ADDSLOTS", slot)
    lease = await waiting
    assert lease
    await lease.release()


@pytest.mark.parametrize("prefix", ["lock:", "{all}:"])
async def test_many_ops_at_a_cluster_that_serves_no_name(cluster: Cluster, name: str, prefix: str) -> None:
    """1,000 tasks want a lock each, in many slots or in one slot that has its master. Neither the ops nor the questions
    for the slots are a load: about 2,000 and 20 in a second."""
    lost = next(slot for slot in range(100) if slot != slot_of(prefix, ""))
    async with Redlock(cluster.url, prefix=prefix, **PATIENT) as client:
        await client.health()
        owner = cluster.drop(lost)
        began, refused = time.monotonic(), cluster.refusals("CLUSTERDOWN")
        looks = sum(calls_of(each, "cluster|slots") for each in cluster.up())
        tasks = [client(f"{name}{n}").acquire(timeout=3) for n in range(1000)]
        assert not any(each for each in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(each, Lease))
        refused = cluster.refusals("CLUSTERDOWN") - refused
        looks = sum(calls_of(each, "cluster|slots") for each in cluster.up()) - looks
        seconds = time.monotonic() - began
        assert 1000 <= refused < 3000 + 2500 * seconds
        assert looks < 100 + 2 * 25 * seconds  # two masters are asked
        owner.cli("CLUSTER", "ADDSLOTS", lost)
        async with client(name, timeout=LIMIT):
            pass
        await until(lambda: all(each.serves() for each in cluster.up()))


async def test_f7_releases_while_a_slot_has_no_master(cluster: Cluster, other: Redlock, name: str) -> None:
    """One is refused with CLUSTERDOWN, the other one comes when the client knows that no master has the slot. When the
    old master has it again, with its keys, it gets both."""
    names = [f"{{{name}}}{letter}" for letter in "ab"]
    slot = slot_of(PREFIX, names[0])
    async with Redlock(cluster.url, lease=LONG, max_lease=LONG, **PATIENT) as client:
        first, second = [await client(each, renew=False).acquire(timeout=None) for each in names]
        owner = cluster.drop(slot)
        await first.release()
        async with asyncio.timeout(LIMIT):
            while f"slots {slot}: no master has them" not in (await client.health()).reason:
                await asyncio.sleep(0.01)
        await second.release()
        assert held_at(owner, names[0])
        assert held_at(owner, names[1])
        owner.cli("CLUSTER", "ADDSLOTS", slot)
        for each in names:
            async with other(each, timeout=LIMIT):
                pass
