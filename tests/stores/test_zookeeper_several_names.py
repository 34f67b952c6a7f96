"""Waiters for several names in ZooKeeper (`multi`), beside tasks that lock the same names one inside the other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from kazoo.client import KazooClient

from asynclock import Lease, Redlock
from asynclock.stores.zookeeper import hold_and_wait, turns
from tests.support.probes import acquisitions_of, waits_for_notice
from tests.support.services.zookeeper import ZooKeeper
from tests.support.waiters import LIMIT, until
from tests.support.zookeeper_clients import client_of
from tests.support.zookeeper_probes import connection_of, contenders_of, held_thread, holds_and_waits


@pytest.fixture
async def clients(shared_zookeeper: ZooKeeper) -> AsyncIterator[list[Redlock]]:
    found = [client_of(shared_zookeeper) for _ in range(4)]
    async with found[0], found[1], found[2], found[3], asyncio.timeout(2 * LIMIT):
        yield found


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter for several names closes the name that refused it after its first refusal."""
    monkeypatch.setattr(turns, "_CLOSES", 1)


async def waits(client: Redlock) -> None:
    """Until its only acquire has its refusal, and watches."""
    await until(lambda: [waits_for_notice(each) for each in acquisitions_of(client)] == [True])


@pytest.mark.parametrize("order", ["ab", "ba"])
async def test_f10_beside_nested_locks(clients: list[Redlock], name: str, order: str) -> None:
    """Two clients take both names in turns, one inside the other, and one of them is always waiting. Each gets the
    inner name, and the waiter for both gets its turn."""
    outer, inner = (f"{name}:{each}" for each in order)
    counts: Counter[int] = Counter()
    stop = asyncio.Event()

    async def nested(number: int) -> None:
        while not stop.is_set():
            async with clients[number](outer, timeout=None):
                await asyncio.sleep(0.02)  # so that the other one waits
                async with clients[number](inner, timeout=LIMIT / 2):
                    counts[number] += 1

    tasks = [asyncio.create_task(nested(number)) for number in range(2)]
    await until(lambda: all(counts[number] for number in range(2)))
    for _ in range(2):
        async with clients[2].multi(f"{name}:a", f"{name}:b", timeout=None) as lease:
            before = counts.copy()
            await asyncio.sleep(0.05)
            assert lease.held
            assert counts == before
    stop.set()
    await asyncio.gather(*tasks)


async def test_f10_beside_single_locks_that_last(
    clients: list[Redlock], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks of two clients hold each name in turn, for longer than the waiter for both waits for a client that waits
    behind it: for 4 s, in a tenth of the time. It gets its turn."""
    for each in ("_LOOK", "_ROUND"):
        monkeypatch.setattr(hold_and_wait, each, getattr(hold_and_wait, each) / 10)
    stop = asyncio.Event()

    async def single(client: Redlock, which: str) -> None:
        while not stop.is_set():
            async with client(which, timeout=None):
                await asyncio.sleep(0.4)
            await asyncio.sleep(0.03)

    names = [f"{name}:a", f"{name}:b"]
    tasks = [asyncio.create_task(single(client, each)) for client in clients[:2] for each in names]
    async with asyncio.timeout(LIMIT), clients[2].multi(*names, timeout=None):
        stop.set()
    await asyncio.gather(*tasks)


@pytest.mark.usefixtures("at_once")
async def test_f10_a_holder_that_waits_behind_it(clients: list[Redlock], name: str) -> None:
    """The waiter has one of its names, and waits for the holder of the other one, who wants the first one. So the
    waiter steps back, and gets its turn when both names are released."""
    holder, other, waiter = clients[:3]
    b = await holder(f"{name}:b").acquire(timeout=None)
    a = await other(f"{name}:a").acquire(timeout=None)
    waiting = asyncio.create_task(waiter.multi(f"{name}:a", f"{name}:b").acquire(timeout=None))
    await waits(waiter)
    await a.release()
    await until(lambda: holds_and_waits(waiter))
    async with holder(f"{name}:a", timeout=LIMIT / 2):
        assert not waiting.done()
        await b.release()
    lease = await waiting
    await lease.release()


async def behind_a_closed_name(clients: list[Redlock], names: list[str]) -> tuple[Lease, list[asyncio.Task[Lease]]]:
    """The lease of the first name, and those that wait for it: a waiter for all names, which has closed it, and later
    ones."""
    holder, waiter, *later = clients
    lease = await holder(names[0]).acquire(timeout=None)
    waiting = [asyncio.create_task(waiter.multi(*names).acquire(timeout=None))]
    await waits(waiter)
    for client in later:
        waiting.append(asyncio.create_task(client(names[0]).acquire(timeout=None)))
        await waits(client)
    return lease, waiting


@pytest.mark.usefixtures("at_once")
async def test_f10_later_arrivals_wait_behind_it_in_their_order(clients: list[Redlock], name: str) -> None:
    """It has closed a name. Those that arrive later enter after it, each in its turn. So do the tokens rise."""
    holder, names = clients[0], [f"{name}:{each}" for each in "ab"]
    lease, waiting = await behind_a_closed_name(clients, names)
    assert sum(each.tasks for each in (await holder.inspect(names[0])).waiters) == 3
    leases: list[Lease] = [lease]
    for number, task in enumerate(waiting):
        await leases[-1].release()
        leases.append(await task)
        assert not any(each.done() for each in waiting[number + 1 :])
    await leases[-1].release()
    assert [each.fence for each in leases] == sorted({each.fence for each in leases})


@pytest.mark.usefixtures("at_once")
async def test_f10_a_closed_name_is_open_again_once_its_waiter_has_it(clients: list[Redlock], name: str) -> None:
    """Although others wait. Each has its place in the queue of the name then, and needs no other node."""
    holder, names = clients[0], [f"{name}:{each}" for each in "ab"]
    lease, waiting = await behind_a_closed_name(clients, names)
    await lease.release()
    async with asyncio.timeout(LIMIT):
        while any("__next__" in each for each in await connection_of(holder).children(f"/locks/{names[0]}")):
            await asyncio.sleep(0.02)
    for each in waiting:
        await (await each).release()


@pytest.mark.usefixtures("at_once")
async def test_f10_a_waiter_at_a_closed_name_keeps_its_turn(
    clients: list[Redlock], name: str, shared_zookeeper: ZooKeeper
) -> None:
    """The first one that waits at the name meets a node that another library has created meanwhile, and still enters
    before the second one. Else each of them would go to the end of the queue in turn."""
    holder, closing, first, second = clients
    which = f"{name}:a"
    lease = await holder(which).acquire(timeout=None)
    several = asyncio.create_task(closing.multi(which, f"{name}:b").acquire(timeout=None))
    await waits(closing)
    tasks: list[asyncio.Task[Lease]] = []
    for client in (first, second):
        tasks.append(asyncio.create_task(client(which).acquire(timeout=None)))
        await waits(client)
    other = KazooClient(shared_zookeeper.address)
    await asyncio.to_thread(other.start)
    try:
        node = await asyncio.to_thread(
            other.create, f"/locks/{which}/{'f' * 32}__lock__", ephemeral=True, sequence=True
        )
        with held_thread(second):  # its ticket stays
            several.cancel()
            await asyncio.wait({several})
            await lease.release()
            await until(lambda: any(each.nodes and each.watcher for each in contenders_of(first).values()))
            await asyncio.to_thread(other.delete, node)
            lease = await tasks[0]
        assert not tasks[1].done()
        await lease.release()
        await (await tasks[1]).release()
    finally:
        await asyncio.to_thread(other.stop)
        await asyncio.to_thread(other.close)
