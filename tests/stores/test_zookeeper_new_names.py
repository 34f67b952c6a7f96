"""The first lock of a name that the servers do not know: what it costs, and what may come between its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss

from asynclock import QuorumUnavailable, Redlock
from asynclock.stores.zookeeper.connection import Connection
from tests.support.services.zookeeper import ZooKeeper
from tests.support.waiters import LIMIT
from tests.support.zookeeper_clients import client_of
from tests.support.zookeeper_probes import connection_of


@pytest.fixture
async def clients(shared_zookeeper: ZooKeeper) -> AsyncIterator[list[Redlock]]:
    found = [client_of(shared_zookeeper, 60.0) for _ in range(2)]
    async with found[0], found[1]:
        yield found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that leave, by the name of their class."""
    known, ask = list[str](), Connection._ask  # noqa: SLF001 - the one place that all requests pass

    async def noted(self: Connection, request: Any) -> Any:
        known.append(type(request).__name__)
        return await ask(self, request)

    monkeypatch.setattr(Connection, "_ask", noted)
    return known


async def test_the_first_lock_of_a_name_is_created_at_once(clients: list[Redlock], name: str, asked: list[str]) -> None:
    """The node of the lock and that of the holder are created together, so nobody can be before it. Later ones look who
    is."""
    lease = await clients[0](name).acquire()
    assert asked == ["Create2", "Transaction", "Exists"]
    fence = lease.fence
    await lease.release()
    asked.clear()
    async with clients[1](name) as lease:
        assert asked == ["Create2", "GetChildren"]
        assert lease.fence > fence


async def test_another_client_creates_the_node_of_the_lock_meanwhile(
    clients: list[Redlock], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the name is not new, and the client waits behind the other one."""
    first, other = clients
    held, create_first = [], Connection.create_first

    async def later(self: Connection, path: str, data: bytes) -> Any:
        monkeypatch.undo()
        held.append(await other(name).acquire())
        return await create_first(self, path, data)

    monkeypatch.setattr(Connection, "create_first", later)
    assert await first(name).acquire(timeout=0) is None
    waiting = asyncio.ensure_future(first(name).acquire())
    await held[0].release()
    await (await waiting).release()


async def test_c2_the_first_lock_of_a_name_without_a_reply(
    clients: list[Redlock], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it created is found and deleted."""
    first, other = clients
    create_first = Connection.create_first

    async def lost(self: Connection, path: str, data: bytes) -> Any:
        monkeypatch.undo()
        await create_first(self, path, data)
        raise ConnectionLoss

    monkeypatch.setattr(Connection, "create_first", lost)
    with pytest.raises(QuorumUnavailable):
        await first(name).acquire(timeout=0)
    async with other(name):
        pass


async def test_the_path_of_the_url_is_new(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The first lock there creates all its parents."""
    url = shared_zookeeper.url(f"/new-{name}/deep/locks", session_timeout=60)
    async with Redlock(url, lease=60.0, connect_timeout=LIMIT / 2, patience=LIMIT) as client, client(name):
        assert name in await connection_of(client).children(f"/new-{name}/deep/locks")
