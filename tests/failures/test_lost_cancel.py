"""A cancel that redis-py loses while it connects: asyncio.wait_for on Python 3.11 does, where the connection breaks in
the same turn of the loop."""

from __future__ import annotations

import asyncio
from typing import Any

from asynclock import Redlock
from asynclock.stores.redis.store import RedisStore
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
