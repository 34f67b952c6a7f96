"""The servers number the nodes of a name, and cannot count beyond 2^31 - 1."""

from __future__ import annotations

import asyncio

import pytest

from asynclock import QuorumUnavailable, Redlock
from asynclock.stores.zookeeper import layout
from tests.support.services.zookeeper import ZooKeeper
from tests.support.waiters import LIMIT, until
from tests.support.zookeeper_clients import client_of
from tests.support.zookeeper_probes import connection_of, contenders_of


@pytest.fixture(autouse=True)
def last(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end after two nodes."""
    monkeypatch.setattr(layout, "_LAST", 2)


async def places(client: Redlock, name: str) -> list[int]:
    """Those of the nodes of a name, in order."""
    return sorted(map(layout.place_of, await connection_of(client).children(f"/locks/{name}")))


async def test_the_numbers_of_a_free_name_begin_again(shared_zookeeper: ZooKeeper, name: str) -> None:
    """Nobody enters by a number beyond the last one. Fencing tokens rise."""
    fences: list[int] = []
    async with client_of(shared_zookeeper) as client:
        for place in (0, 1, 0, 1):
            async with client(name) as lease:
                assert await places(client, name) == [place]
                fences.append(lease.fence)
        async with client.multi(name, f"{name}:2") as lease:
            assert await places(client, name) == [0]
            fences.append(lease.fence)
    assert fences == sorted(set(fences))


async def test_nobody_overtakes_a_holder_by_a_number_beyond_the_last(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The order of such nodes is not known. An acquire leaves none, and its error says why."""
    async with client_of(shared_zookeeper) as client, client_of(shared_zookeeper, patience=0) as other:
        async with client(name):
            pass
        async with client(name) as lease:
            with pytest.raises(QuorumUnavailable, match="numbered 2\\^31 nodes of /locks/"):
                await other(name).acquire(timeout=LIMIT)
            assert await places(client, name) == [1]
        async with other(name) as again:
            assert await places(client, name) == [0]
            assert again.fence > lease.fence


async def test_a_waiter_with_such_a_number_gets_another_one(
    shared_zookeeper: ZooKeeper, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was found after a create without a reply, or could not be deleted at once."""
    monkeypatch.setattr(layout, "_LAST", 2**31 - 1)
    async with client_of(shared_zookeeper) as client, client_of(shared_zookeeper) as other, asyncio.timeout(LIMIT):
        held = await other(name).acquire(timeout=None)
        waiting = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: any(each.watcher for each in contenders_of(client).values()))
        monkeypatch.setattr(layout, "_LAST", 1)
        await held.release()
        lease = await waiting
        assert await places(client, name) == [0]
        await lease.release()
