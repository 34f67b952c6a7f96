"""Which `sync` of ZooKeeper counts for which read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss

from asynclock.stores.zookeeper.syncs import Syncs


class Asked:
    """The requests that were asked, and what the connection does with them."""

    def __init__(self) -> None:
        self.all: list[tuple[asyncio.Future[Any], Callable[[], object]]] = []

    def __call__(self, request: Any, leaves: Callable[[], object]) -> asyncio.Future[Any]:
        self.all.append((asyncio.get_running_loop().create_future(), leaves))
        return self.all[-1][0]

    def leave(self, number: int) -> None:
        """It is sent to the server."""
        self.all[number][1]()

    def answer(self, number: int) -> None:
        self.all[number][0].set_result("/")

    def fail(self, number: int) -> None:
        self.all[number][0].set_exception(ConnectionLoss())


async def test_a_sync_that_has_left_counts_for_no_later_read() -> None:
    """It may have passed a leader that is lost by then. Until it leaves, all have the same one."""
    asked = Asked()
    syncs = Syncs(asked)
    first, second = await asyncio.gather(syncs.queued("/a"), syncs.queued("/b"))
    assert first is second is await syncs.queued("/c")
    asked.leave(0)
    third = await syncs.queued("/d")
    assert third is not first
    asked.answer(0)
    await first.answered()
    assert third is await syncs.queued("/e")
    assert len(asked.all) == 2


async def test_each_that_shares_a_sync_fails_with_it() -> None:
    """Also if it was never sent, since the connection is lost. The next one is another one."""
    asked = Asked()
    syncs = Syncs(asked)
    sync = await syncs.queued("/a")
    asked.fail(0)
    for _ in range(2):
        with pytest.raises(ConnectionLoss):
            await sync.answered()
    assert await syncs.queued("/a") is not sync


async def test_a_caller_that_is_cancelled_takes_the_sync_from_no_other() -> None:
    asked = Asked()
    syncs = Syncs(asked)
    sync = await syncs.queued("/a")
    first, second = (asyncio.create_task(sync.answered()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    asked.answer(0)
    await second
