"""The first lock of a name that the servers do not know: what it costs, and what may come between its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionLoss
from kazoo.security import make_acl

from asynclock import ConfigError, QuorumUnavailable, Redlock
from asynclock.stores.zookeeper.connection import Connection
from tests.support.services.zookeeper import ZooKeeper
from tests.support.waiters import LIMIT
from tests.support.zookeeper_clients import client_of
from tests.support.zookeeper_probes import connection_of, requests_of


@pytest.fixture
async def clients(shared_zookeeper: ZooKeeper) -> AsyncIterator[list[Redlock]]:
    found = [client_of(shared_zookeeper, 60.0) for _ in range(2)]
    async with found[0], found[1]:
        yield found


async def test_the_first_lock_of_a_name_is_created_at_once(clients: list[Redlock], name: str) -> None:
    """The node of the lock and that of the holder are created together, so nobody can be before it. Later ones look who
    is."""
    first, other = clients
    await first(f"{name}:else").locked()  # it connects
    asked = requests_of(first)
    async with first(name) as lease:
        assert asked[:3] == ["Create2", "Transaction", "Exists"]
        fence = lease.fence
    await other(f"{name}:else").locked()
    asked = requests_of(other)
    async with other(name) as lease:
        assert asked[:2] == ["Create2", "GetChildren"]
        assert lease.fence > fence


async def test_another_client_creates_the_node_of_the_lock_meanwhile(
    clients: list[Redlock], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the name is not new, and the client is refused, or waits, as for any name. It does not look for a node that
    it may have created."""
    first, other = clients
    held, create_first = [], Connection.create_first

    async def later(self: Connection, path: str, data: bytes) -> Any:
        monkeypatch.setattr(Connection, "create_first", create_first)
        held.append(await other(name).acquire())
        return await create_first(self, path, data)

    monkeypatch.setattr(Connection, "create_first", later)
    await first(f"{name}:else").locked()  # it connects
    asked = requests_of(first)
    assert await first(name).acquire(timeout=0) is None
    assert "Sync" not in asked
    waiting = asyncio.ensure_future(first(name).acquire())
    await held[0].release()
    await (await waiting).release()


@pytest.mark.parametrize("request_", ["create_first", "exists"])
async def test_c2_the_first_lock_of_a_name_without_a_reply(
    request_: str, clients: list[Redlock], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it created is found and deleted."""
    first, other = clients
    request = getattr(Connection, request_)

    async def lost(self: Connection, *args: Any) -> Any:
        monkeypatch.setattr(Connection, request_, request)
        await request(self, *args)
        raise ConnectionLoss

    monkeypatch.setattr(Connection, request_, lost)
    with pytest.raises(QuorumUnavailable):
        await first(name).acquire(timeout=0)
    async with other(name):
        pass


async def test_an_operator_deletes_its_node_at_once(
    clients: list[Redlock], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the client has its token. Nobody holds the lock, and the next attempt is a usual one."""
    first, other = clients
    create_first = Connection.create_first

    async def deleted(self: Connection, path: str, data: bytes) -> str:
        made = await create_first(self, path, data)
        await self.delete(made)
        return made

    monkeypatch.setattr(Connection, "create_first", deleted)
    with pytest.raises(QuorumUnavailable):
        await first(name).acquire(timeout=0)
    for each in (other, first):
        async with each(name):
            pass


async def test_c13_a_path_in_which_it_may_create_nothing_any_more(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The error names the path, and not the name below it."""
    path = f"/closed-{name.replace(':', '-')}"
    owner = KazooClient(shared_zookeeper.address)
    owner.start()
    async with Redlock(shared_zookeeper.url(path), patience=LIMIT) as client:
        owner.set_acls(path, [make_acl("world", "anyone", read=True, write=True)])
        with pytest.raises(ConfigError, match=f"lacks the permission CREATE on {path}:"):
            await client("n").acquire(timeout=0)
    owner.stop()
    owner.close()


async def test_the_path_of_the_url_is_new(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The first lock there creates all its parents."""
    url = shared_zookeeper.url(f"/new-{name}/deep/locks", session_timeout=60)
    async with Redlock(url, lease=60.0, connect_timeout=LIMIT / 2, patience=LIMIT) as client, client(name):
        assert name in await connection_of(client).children(f"/new-{name}/deep/locks")
