"""The semaphore, on every deployment and both loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asynclock import ConfigError, Lease, Redlock, SelfDeadlock
from tests.support.probes import acquisitions_of
from tests.support.servers import Server
from tests.support.still_clock import Still, idle
from tests.support.waiters import LIMIT, until


async def filled(client: Redlock, name: str, permits: int) -> list[Lease]:
    """As many leases as there are permits, each by one try."""
    tries = [await client.semaphore(name, permits).acquire(timeout=0) for _ in range(permits)]
    leases = [lease for lease in tries if lease is not None]
    assert len(leases) == permits
    return leases


@pytest.mark.every_store
async def test_e12_never_more_than_permits(make: Callable[..., Redlock], name: str) -> None:
    """Many tasks in many clients; and all the permits are used."""
    clients = [make() for _ in range(3)]
    inside = 0
    all_used = asyncio.Event()
    fences: list[int] = []

    async def work(client: Redlock) -> None:
        nonlocal inside
        for _ in range(5):
            given = max(fences, default=0)
            async with client.semaphore(name, 3) as lease:
                assert lease.fence > given  # of all that were given before it began
                inside += 1
                assert inside <= 3
                fences.append(lease.fence)
                if inside == 3:
                    all_used.set()
                await all_used.wait()
                await asyncio.sleep(0.005)  # the others ask meanwhile
                inside -= 1

    async with asyncio.timeout(LIMIT):
        await asyncio.gather(*(work(clients[number % 3]) for number in range(12)))
    assert len(fences) == 60


async def test_every_permit_can_be_had_by_one_try(make: Callable[..., Redlock], name: str) -> None:
    """timeout=0 finds the slot that is free. Each time there is one less, and in the end none."""
    leases = await filled(make(), name, 7)
    other = make().semaphore(name, 7)
    assert await other.acquire(timeout=0) is None
    await leases[3].release()
    again = await other.acquire(timeout=0)
    assert again is not None
    assert again.fence > max(lease.fence for lease in leases)
    assert await other.acquire(timeout=0) is None
    for lease in [*leases[:3], *leases[4:], again]:
        await lease.release()
    assert not await other.locked()


@pytest.mark.every_store
async def test_a_waiter_gets_the_permit_that_is_released(make: Callable[..., Redlock], name: str) -> None:
    """By a notice, at once, though no renewal is due for 10 s."""
    leases = await filled(make(), name, 3)
    waiting = [asyncio.create_task(make().semaphore(name, 3).acquire(timeout=30)) for _ in range(2)]
    client = make()
    async with asyncio.timeout(8):
        while sum(waiter.tasks for waiter in (await client.inspect(name)).waiters) != 2:
            await asyncio.sleep(0.005)
        await leases[0].release()
        await leases[1].release()
        got = await asyncio.gather(*waiting)
    for lease in [leases[2], *got]:
        assert lease is not None
        await lease.release()


@pytest.mark.every_store
async def test_waiters_of_one_client_get_permits_one_by_one(make: Callable[..., Redlock], name: str) -> None:
    """The notice for the first one is not the last for the name: the second one has its permit while the first one has
    nothing to ask."""
    leases, client = await filled(make(), name, 2), make()
    left = {asyncio.create_task(client.semaphore(name, 2).acquire(timeout=30)) for _ in range(2)}
    async with asyncio.timeout(8):
        while sum(waiter.tasks for waiter in (await client.inspect(name)).waiters) != 2:
            await asyncio.sleep(0.005)
        for lease in leases:
            await lease.release()
            served, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            leases = [*leases, *(task.result() for task in served)]
    for lease in leases[2:]:
        await lease.release()


async def test_a_lost_permit_comes_back_after_its_lease(make: Callable[..., Redlock], name: str) -> None:
    """Its holder does not renew it any more."""
    lost = await make().semaphore(name, 1, lease=3.0, renew=False).acquire(timeout=None)
    async with make().semaphore(name, 1, timeout=10) as lease:
        assert lease.fence > lost.fence
        assert not lost.held


async def test_each_callers_own_number_counts(make: Callable[..., Redlock], name: str) -> None:
    """A rolling deploy from 2 to 4 permits: the new clients fill up to 4, the old ones wait until fewer than 2 are
    left."""
    old, new = make().semaphore(name, 2), make().semaphore(name, 4)
    first = [await old.acquire(timeout=0), await old.acquire(timeout=0)]
    assert await old.acquire(timeout=0) is None
    more = [await new.acquire(timeout=0), await new.acquire(timeout=0)]
    assert await new.acquire(timeout=0) is None
    leases = [lease for lease in [*first, *more] if lease is not None]
    assert len(leases) == 4
    await leases[0].release()
    await leases[1].release()
    assert await old.acquire(timeout=0) is None
    await leases[2].release()
    last = await old.acquire(timeout=0)
    assert last is not None
    await last.release()
    await leases[3].release()


@pytest.mark.parametrize("nodes", [1, 5])
async def test_holds_are_renewed_each_for_itself(name: str, nodes: int) -> None:
    """The watchdog renews them; one that ends does not affect the others."""
    still = Still(nodes, name)
    async with still.client(lease=9.0) as client, still.client(lease=9.0) as other:
        first, second = [await each.semaphore(name, 2).acquire(timeout=None) for each in (client, other)]
        await still.until(still.clock.now() + 60.0)
        assert first.held
        assert second.held
        assert await other.semaphore(name, 2).acquire(timeout=0) is None
        await first.release()
        await still.until(still.clock.now() + 60.0)
        assert second.held
        await second.release()


async def test_a_task_with_every_permit_that_asks_for_more_raises(redlock: Redlock, name: str) -> None:
    """It would wait for itself. While others have permits, it waits for them."""
    first = await redlock.semaphore(name, 2).acquire(timeout=None)
    second = await redlock.semaphore(name, 2).acquire(timeout=None)
    with pytest.raises(SelfDeadlock):
        await redlock.semaphore(name, 2).acquire()
    waiting = asyncio.create_task(redlock.semaphore(name, 2).acquire())
    await until(lambda: acquisitions_of(redlock) and idle(redlock))
    await first.release()
    async with asyncio.timeout(LIMIT):
        await (await waiting).release()
    await second.release()


@pytest.mark.parametrize("permits", [0, -1, 1.5, True, "3", None, 10**9])
def test_permits_are_a_whole_number(permits: Any) -> None:
    """Other values are refused when the lock is made."""
    with pytest.raises(ConfigError, match="permits"):
        Redlock("redis://nowhere").semaphore("a", permits)


async def test_e12_whichever_minority_fails(five: list[Server], name: str) -> None:
    """Never more holders than permits, though nodes fail that have some holds and not others."""
    async with Redlock(*(server.url for server in five), node_timeout=5.0) as client:
        five[0].kill()
        leases = await filled(client, name, 3)
        five[1].kill()
        assert await asyncio.create_task(client.semaphore(name, 3).acquire(timeout=0)) is None
        await leases[0].release()
        again = await client.semaphore(name, 3).acquire(timeout=10)
        assert again is not None
        assert await asyncio.create_task(client.semaphore(name, 3).acquire(timeout=0)) is None
        for lease in [*leases[1:], again]:
            await lease.release()
