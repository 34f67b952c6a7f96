"""A cancel that redis-py loses while it connects: asyncio.wait_for on Python 3.11 does, where the connection breaks in
the same turn of the loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from asynclock import Redlock
from asynclock.stores.redis.store import RedisStore
from tests.support.default_keys import key_of
from tests.support.probes import transport_of
from tests.support.servers import Server


class LosesCancel(RedisStore):
    """Its connections turn a cancel into an error, as wait_for does."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.connects = asyncio.Event()

    async def dial(self) -> Any:
        connection: Any = await super().dial()
        connection.connect = self._connect
        return connection

    async def _connect(self) -> None:
        self.connects.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionResetError("Connection lost") from None


class OutlivesCancel(RedisStore):
    """The connect of its second connection loses a cancel, as wait_for does where the reply comes in the same turn. It
    goes on once there is a third connection."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.made: list[Any] = []
        self.connects, self.goes_on = asyncio.Event(), asyncio.Event()

    async def dial(self) -> Any:
        connection: Any = await super().dial()
        self.made.append(connection)
        if len(self.made) == 2:
            self._connect = connection.connect
            connection.connect = self._connect_late
        elif len(self.made) > 2:
            self.goes_on.set()
        return connection

    async def _connect_late(self) -> None:
        await self._connect()
        self.connects.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await self.goes_on.wait()


@pytest.mark.usefixtures("patient_farewells")
async def test_a10_a_connection_that_comes_while_the_client_closes_is_closed(server: Server, name: str) -> None:
    """A client that closes does not wait long for a connect that its cancel does not end. It connects once more to
    deliver a release. Both connections are closed, and the name is free."""
    store = OutlivesCancel(server.url)
    async with Redlock(store) as client:
        lease = await client(name).acquire(timeout=0)
        server.cli().client_kill_filter(_type="pubsub")
        await store.connects.wait()
        transport = transport_of(store.made[1])
        before = asyncio.all_tasks() - {asyncio.current_task()}
        await client.aclose()
    assert lease is not None
    assert len(store.made) == 3
    if before:
        await asyncio.wait(before)
    assert transport.is_closing()
    assert not server.cli().exists(key_of(name))


async def test_a10_a_cancel_that_is_lost_ends_the_connecting(server: Server) -> None:
    """asyncio.run cancels all tasks at its end, once, and waits for them: none may go on."""
    store = LosesCancel(server.url)
    before = asyncio.all_tasks()
    acquiring = asyncio.create_task(Redlock(store)("order:42").acquire())
    await store.connects.wait()
    left = asyncio.all_tasks() - before
    assert len(left) > 1
    for task in left:
        task.cancel()
    await asyncio.wait(left)
    assert acquiring.cancelled()
