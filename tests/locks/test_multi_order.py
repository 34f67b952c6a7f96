"""Why a multi has one order of names. It is not needed against deadlocks, since no multi holds one name while it waits
for another. It decides at which name a multi waits."""

from __future__ import annotations

import asyncio

from asynclock import Lease, LockInfo, Redlock
from tests.support.cancelled_waits import SOON, Make
from tests.support.still_clock import idle
from tests.support.waiters import LONG


async def test_multis_of_the_same_locks_wait_in_one_queue(make: Make, name: str) -> None:
    """Three clients want the same names, each in another order, and a fourth holds them. All wait at the same name, so
    a release notifies one of them, and they are served in the order in which they began to wait."""
    a, b, c = (f"{name}:{letter}" for letter in "abc")
    holder = make(lease=LONG)
    lease = await holder.multi(b, c, a).acquire(timeout=None)
    orders = [(c, b, a), (a, b, c), (b, a, c)]
    came: list[int] = []

    async def waits(client: Redlock, number: int) -> None:
        async with client.multi(*orders[number]):
            came.append(number)
            await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    async with asyncio.timeout(SOON):
        for number in range(3):
            client = make(lease=LONG)
            await client.health()
            tasks.append(asyncio.create_task(waits(client, number)))
            while not idle(client):
                await asyncio.sleep(0)
        assert [sum(waiter.tasks for waiter in (await holder.inspect(each)).waiters) for each in (a, b, c)] == [3, 0, 0]
        await lease.release()
        await asyncio.gather(*tasks)
    assert came == [0, 1, 2]


async def test_waiters_at_two_names_do_not_keep_each_other_out(make: Make, name: str) -> None:
    """Two clients wait at one name and two at the other, in order of arrival. Both names are released at once. Each
    waiter stood at the end of the queue in which it had no ticket, and nobody got the names."""
    holder, names = make(lease=LONG), (f"{name}:a", f"{name}:b")
    held, tasks = list[Lease](), list[asyncio.Task[None]]()

    async def waits(client: Redlock) -> None:
        async with client.multi(*(client(each, fair=True) for each in names)):
            await asyncio.sleep(0)

    async with asyncio.timeout(SOON):
        for each in reversed(names):
            held.append(await holder(each, fair=True).acquire(timeout=None))
            for _ in range(2):
                client = make(lease=LONG)
                await client.health()
                tasks.append(asyncio.create_task(waits(client)))
                while not idle(client):
                    await asyncio.sleep(0)
        assert [sum(waiter.tasks for waiter in (await holder.inspect(each)).waiters) for each in names] == [2, 2]
        await asyncio.gather(*(lease.release() for lease in held))
        await asyncio.gather(*tasks)


async def test_a_multi_has_one_name_whatever_the_order(make: Make, name: str) -> None:
    """Messages, events and inspect show it by the same name, and each kind stays with its own name."""
    client = make(lease=LONG)
    a, b = f"{name}:a", f"{name}:b"
    one, other = client.multi(client.read(b), a), client.multi(a, client.read(b))
    assert one.name == other.name == f"{a}, {b}"
    for lock in one, other:
        async with lock:
            shown: dict[str, LockInfo] = {each: await client.inspect(each) for each in (a, b)}
            assert {info.name: info.kind for info in shown.values()} == {a: "mutex", b: "read-write lock"}
