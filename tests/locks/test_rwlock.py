"""The read-write lock, on every deployment and both loops."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from asynclock import Lease, LockLost, QuorumUnavailable, Redlock, SelfDeadlock, Unsupported
from tests.support.servers import Server
from tests.support.still_clock import Still
from tests.support.waiters import LONG


async def waiting(client: Redlock, name: str, count: int) -> None:
    """Until so many wait. A look lasts for 1 s at most, which a busy machine may need for many waiters."""
    found = -1
    async with asyncio.timeout(20):
        while found != count:
            await asyncio.sleep(0.005)
            with suppress(QuorumUnavailable):
                found = sum(waiter.tasks for waiter in (await client.inspect(name)).waiters)


@pytest.mark.every_store
async def test_e10_readers_share_and_writers_do_not(make: Callable[..., Redlock], name: str) -> None:
    """Of many tasks in many clients: any number read at once, one writes alone."""
    clients = [make() for _ in range(3)]
    readers = writers = 0
    fences: list[int] = []

    async def work(number: int) -> None:
        nonlocal readers, writers
        client = clients[number % 3]
        for _ in range(4):
            given = max(fences, default=0)
            if random.random() < 0.7:
                async with client.read(name) as lease:
                    assert lease.fence > given  # of all that were given before it began
                    readers += 1
                    assert not writers
                    await asyncio.sleep(0)
                    readers -= 1
            else:
                async with client.write(name) as lease:
                    writers += 1
                    assert writers == 1
                    assert not readers
                    assert not fences or lease.fence > max(fences)
                    await asyncio.sleep(0)
                    writers -= 1
            fences.append(lease.fence)

    await asyncio.gather(*(work(number) for number in range(12)))
    async with clients[0].read(name), clients[1].read(name):  # by chance those above may never have met
        pass


@pytest.mark.every_store
async def test_e10_a_waiting_writer_holds_new_readers_back(make: Callable[..., Redlock], name: str) -> None:
    """A writer does not starve: a reader that arrives after it is granted after it."""
    client, order = make(), list[str]()
    first = await make().read(name).acquire(timeout=None)

    async def enter(what: str) -> None:
        lock = make().write(name) if what == "writer" else make().read(name)
        async with lock:
            order.append(what)

    tasks = []
    for count, what in enumerate(["writer", "reader", "another"], 1):
        tasks.append(asyncio.create_task(enter(what)))
        await waiting(client, name, count)
    assert await make().read(name).acquire(timeout=0) is None
    assert not order
    await first.release()
    await asyncio.gather(*tasks)
    assert order[0] == "writer"


async def test_a_writer_that_gives_up_lets_the_readers_pass(make: Callable[..., Redlock], name: str) -> None:
    """They are granted at once, beside the readers that hold: none waits for a release."""
    client = make()
    async with make().read(name):
        writer = asyncio.create_task(make().write(name).acquire(timeout=30))
        await waiting(client, name, 1)
        readers = [asyncio.create_task(make().read(name).acquire(timeout=30)) for _ in range(3)]
        await waiting(client, name, 4)
        writer.cancel()
        async with asyncio.timeout(8):  # a third of the lease is 10 s
            leases = await asyncio.gather(*readers)
        for lease in leases:
            assert lease is not None
            await lease.release()


async def test_a_release_admits_all_readers_in_front(make: Callable[..., Redlock], name: str) -> None:
    """The longest prefix of the queue that may hold together, and no reader behind the next writer."""
    client = make()
    writer = await make().write(name).acquire(timeout=None)
    tasks: list[asyncio.Task[Lease | None]] = []
    for count, mode in enumerate(["read", "read", "read", "write", "read"], 1):
        lock = make().write(name) if mode == "write" else make().read(name)
        tasks.append(asyncio.create_task(lock.acquire(timeout=30)))
        await waiting(client, name, count)
    await writer.release()
    async with asyncio.timeout(8):
        front = await asyncio.gather(*tasks[:3])
        assert not tasks[3].done()
        assert not tasks[4].done()
        for lease in front:
            assert lease is not None
            assert lease.fence > writer.fence
            await lease.release()
        second = await tasks[3]
        assert second is not None
        assert second.fence > max(lease.fence for lease in front if lease)
        await second.release()
        last = await tasks[4]
        assert last is not None
        await last.release()


async def test_all_waiting_readers_are_granted(make: Callable[..., Redlock], name: str) -> None:
    """It may take more than one batch: the last reader of one has the next one served, and no reader waits for a
    renewal."""
    client, lease = make(lease=60.0), await make(lease=60.0).write(name).acquire(timeout=None)
    inside, all_in = 0, asyncio.Event()

    async def enter() -> None:
        nonlocal inside
        async with client.read(name):
            inside += 1
            if inside == 150:
                all_in.set()
            await all_in.wait()

    async with asyncio.timeout(12), asyncio.TaskGroup() as group:  # tickets are renewed after 16 s at the soonest
        for _ in range(150):
            group.create_task(enter())
        await waiting(client, name, 150)
        await lease.release()


@pytest.mark.every_store
async def test_each_reader_has_its_own_expiry(make: Callable[..., Redlock], name: str) -> None:
    """A reader that stops renewing expires after its lease; the other one stays."""
    short = await make().read(name, lease=3.0, renew=False).acquire(timeout=None)
    async with make().read(name, lease=30) as long:
        assert await short.wait_lost()
        writer_client = make()
        writer = writer_client.write(name)
        assert await writer.acquire(timeout=0) is None
        async with asyncio.timeout(10):  # the server forgets it a little after its holder does
            while len((await writer_client.inspect(name)).holders) != 1:
                await asyncio.sleep(0.005)
        assert long.held
    async with make().write(name, timeout=10):
        pass


async def test_e10_a_reader_that_asks_to_write_raises(redlock: Redlock, name: str) -> None:
    """It would wait for itself; two such readers would wait for each other."""
    async with redlock.read(name):
        with pytest.raises(SelfDeadlock, match="release it first"):
            await redlock.write(name).acquire()
        async with redlock.read(name, timeout=0):
            pass
        assert await asyncio.create_task(redlock.write(name).acquire(timeout=0)) is None
    async with redlock.write(name):
        with pytest.raises(SelfDeadlock):
            await redlock.read(name).acquire()
        with pytest.raises(SelfDeadlock):
            await redlock.write(name).acquire()


async def test_a_reader_that_would_wait_behind_a_writer_for_itself(make: Callable[..., Redlock], name: str) -> None:
    """A second read is granted while no writer waits, and raises SelfDeadlock where one does."""
    client = make()
    async with client.read(name):
        writer = asyncio.create_task(make().write(name).acquire(timeout=30))
        await waiting(client, name, 1)
        with pytest.raises(SelfDeadlock):
            await client.read(name).acquire()
        writer.cancel()
        await asyncio.wait({writer})


@pytest.mark.parametrize("nodes", [1, 5])
async def test_each_reader_is_renewed(name: str, nodes: int) -> None:
    """The watchdog renews each for itself: no writer comes in while they hold it."""
    still = Still(nodes, name)
    async with still.client(lease=9.0) as client, still.client(lease=9.0) as other:
        leases = [await each.read(name).acquire(timeout=None) for each in (client, client, other)]
        await still.until(still.clock.now() + 60.0)
        assert all(lease.held for lease in leases)
        for lease in leases:
            assert await other.write(name).acquire(timeout=0) is None
            await lease.release()
        await (await other.write(name).acquire(timeout=None)).release()


async def test_a_broken_name_ends_all_readers(make: Callable[..., Redlock], name: str) -> None:
    """Each of them is notified."""
    leases = [await make().read(name).acquire(timeout=None) for _ in range(3)]
    assert await make().break_lock(name)
    async with asyncio.timeout(10):
        assert all(await asyncio.gather(*(lease.wait_lost() for lease in leases)))
    with pytest.raises(LockLost):
        await leases[0].release()


async def test_min_hold_keeps_others_out(make: Callable[..., Redlock], name: str) -> None:
    """A reader that rests excludes writers, not readers."""
    async with make().read(name, lease=LONG, min_hold=LONG):
        pass
    assert await make().write(name).acquire(timeout=0) is None
    async with make().read(name, timeout=0):
        pass


def test_fencing_cannot_be_left_out() -> None:
    """Without fencing a hold is a plain key, which only a mutex can be."""
    with pytest.raises(Unsupported):
        Redlock("redis://nowhere").read("a", fencing=False)


async def test_e10_a_minority_of_dead_nodes_is_not_noticed(five: list[Server], name: str) -> None:
    """Readers and writers go on with three of five."""
    async with Redlock(*(server.url for server in five), node_timeout=5.0) as client:
        async with client.read(name):
            five[0].kill()
            five[1].kill()
            assert await asyncio.create_task(client.write(name).acquire(timeout=0)) is None
        async with client.write(name, timeout=20):
            assert await asyncio.create_task(client.read(name).acquire(timeout=0)) is None
