"""Semaphores in ZooKeeper whose callers give different numbers of permits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynclock import Lease, LockTimeout, Redlock
from tests.support.services.zookeeper import ZooKeeper
from tests.support.waiters import LIMIT, until
from tests.support.zookeeper_clients import client_of
from tests.support.zookeeper_probes import connection_of, contenders_of


async def shows(client: Redlock, name: str, holders: int, waiters: int) -> Any:
    """Return once it shows so many."""
    while True:
        info = await client.inspect(name)
        if (len(info.holders), len(info.waiters)) == (holders, waiters):
            return info
        await asyncio.sleep(0.02)


async def overtaken(holds: Redlock, waits: Redlock, name: str) -> tuple[asyncio.Task[Lease], Lease]:
    """A task of `waits` that asks for one permit, and the lease of `holds` that came later and entered before it, as it
    has five."""
    first = await holds.semaphore(name, 5).acquire(timeout=None)
    one = asyncio.create_task(waits.semaphore(name, 1).acquire(timeout=None))
    await until(lambda: any(each.watcher for each in contenders_of(waits).values()))
    second = await holds.semaphore(name, 5).acquire(timeout=None)
    await first.release()
    return one, second


async def test_a_waiter_for_holders_behind_it_is_shown_as_a_waiter(shared_zookeeper: ZooKeeper, name: str) -> None:
    """They came later, and entered because they have more permits. An operator sees who holds the name, and a break
    leaves the waiter its place. Once it has entered it is shown as a holder, whoever comes behind it."""
    async with (
        client_of(shared_zookeeper, metadata="two") as holds,
        client_of(shared_zookeeper, metadata="one") as waits,
        asyncio.timeout(2 * LIMIT),
    ):
        one, second = await overtaken(holds, waits, name)
        info = await shows(holds, name, 1, 1)
        assert (info.holders[0].metadata, info.fence) == ("two", second.fence)
        before = await connection_of(waits).children(f"/locks/{name}")
        assert await holds.break_lock(name)
        lease = await one
        assert {*await connection_of(waits).children(f"/locks/{name}")} < {*before}  # it is where it was
        third = await holds.semaphore(name, 5).acquire(timeout=None)
        info = await shows(holds, name, 2, 0)
        assert sorted(each.metadata for each in info.holders) == ["one", "two"]
        for each in (lease, third):
            await each.release()


async def test_the_error_names_no_waiter_as_the_holder(shared_zookeeper: ZooKeeper, name: str) -> None:
    """Of one that comes behind both, and has few permits."""
    async with (
        client_of(shared_zookeeper, metadata="holds") as holds,
        client_of(shared_zookeeper, metadata="waits") as waits,
        asyncio.timeout(2 * LIMIT),
    ):
        one, second = await overtaken(holds, waits, name)
        with pytest.raises(LockTimeout) as refused:
            async with holds.semaphore(name, 1, timeout=0):
                pass
        assert refused.value.holder is not None
        assert refused.value.holder.metadata == "holds"
        await second.release()
        await (await one).release()
