"""A close ends whatever happened before: an acquire that no loop runs any more, or a store that never closes."""

from __future__ import annotations

import asyncio
import logging

import pytest

from asynclock import Redlock
from asynclock.runtime import shutdown
from asynclock.stores.memory import MemoryStore
from tests.support.waiters import LIMIT, LONG


async def test_a_close_ends_although_an_acquire_is_stuck(name: str) -> None:
    """A KeyboardInterrupt may end the call that would have woken a task: then its acquire waits for ever."""
    client = Redlock(MemoryStore(), lease=LONG)
    async with client:
        lease = await asyncio.create_task(client(name).acquire(timeout=None))  # not of the task that waits
        stuck = client(name).acquire(timeout=None)
        stuck.send(None)  # nobody sends it another one
        async with asyncio.timeout(LIMIT):
            await client.aclose()
        assert not lease.held
        stuck.close()


class Deaf(MemoryStore):
    """Its close never ends."""

    async def unlisten(self, tag: str) -> None:  # type: ignore[override]
        del tag
        while True:
            try:
                await asyncio.sleep(LONG)
            except asyncio.CancelledError:
                if self.over:
                    raise

    over = False


async def test_a_close_ends_although_a_store_ignores_its_cancel(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left behind."""
    monkeypatch.setattr(shutdown, "CLOSING", 0.1)
    store = Deaf()
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(LIMIT):
            async with Redlock(store) as client, client(name):
                pass
    store.over = True
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    assert caplog.messages == []
