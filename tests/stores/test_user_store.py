"""A store that a user writes. The tests of all kinds of locks run over it, too (`make` in conftest.py); here is what a
transaction that takes its time, or fails, must not do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asynclock import LockTimeout, QuorumUnavailable, Redlock
from asynclock.stores.transactional import Step
from tests.support.user_store import DictStore
from tests.support.waiters import LIMIT, until

PAGE = Path(__file__).parents[2] / "docs" / "stores.md"


def test_the_page_shows_the_store_that_is_tested() -> None:
    """Word for word."""
    source = (Path(__file__).parents[1] / "support" / "user_store.py").read_text()
    shown = source[source.index("class DictStore") : source.index("def state_of")].strip()
    assert shown in PAGE.read_text()
    assert len(shown.splitlines()) <= 30


class Odd(DictStore):
    """Its transactions wait while it is `stuck`, and fail with `error`, before or after they were committed."""

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.stuck: asyncio.Event | None = None
        self.error: Exception | None = None
        self.committed = False

    async def transact(self, keys: Sequence[str], step: Step) -> None:
        assert not self.running  # one at a time, of one client
        self.running += 1
        try:
            if self.stuck is not None:
                await self.stuck.wait()
            if self.error is None or self.committed:
                await super().transact(keys, step)
            if self.error is not None:
                raise self.error
        finally:
            self.running -= 1


async def test_a_transaction_that_takes_too_long_casts_no_vote(name: str) -> None:
    """The caller is told so in time. What it was to create is taken back, since the undo comes after it."""
    store = Odd()
    async with Redlock(store, node_timeout=0.05, lease=5.0, patience=0) as client:
        await client.health()
        store.stuck = asyncio.Event()
        with pytest.raises(QuorumUnavailable, match="did not answer"):
            await client(name).acquire(timeout=0)
        store.stuck.set()
        store.stuck = None
        await until(lambda: name in str(list(store.states)))
        async with asyncio.timeout(LIMIT), client(name):
            pass


@pytest.mark.parametrize("committed", [False, True])
async def test_a_transaction_that_fails_is_ambiguous(name: str, committed: bool) -> None:
    """It may have been committed, so the attempt is undone. Once the store works again the name is free."""
    store = Odd()
    async with Redlock(store, patience=0) as client:
        await client.health()
        store.error, store.committed = OSError("the database hung up"), committed
        with pytest.raises(QuorumUnavailable, match="the database hung up"):
            await client(name).acquire(timeout=0)
        store.error = None
        async with asyncio.timeout(LIMIT), client(name):
            pass


async def test_a_store_that_cannot_be_reached_is_asked_again(name: str) -> None:
    """The first `listen` fails. The acquire goes on trying, and has the lock once the store is there."""

    class Away(DictStore):
        away = True

        def listen(self, tag: str, receive: Any) -> None:
            if self.away:
                raise OSError("nobody is there")
            super().listen(tag, receive)

    store = Away()
    client = Redlock(store, patience=LIMIT)
    async with asyncio.timeout(LIMIT):
        with pytest.raises(QuorumUnavailable, match="nobody is there"):
            await client(name).acquire(timeout=0)
        waiting = asyncio.create_task(client(name).acquire())
        await asyncio.sleep(0)
        store.away = False
        lease = await waiting
        assert lease
        await lease.release()
        await client.aclose()


async def test_a_client_that_closes_waits_for_its_release(name: str) -> None:
    """It is on its way in the queue of the node; after that the name is free for others."""
    store = Odd()
    client = Redlock(store)
    lease = await client(name).acquire(timeout=None)
    releasing = asyncio.create_task(lease.release())
    await asyncio.sleep(0)
    await client.aclose()
    await releasing
    async with Redlock(store) as other:
        try:
            async with other(name, timeout=0):
                pass
        except LockTimeout:
            pytest.fail("the release was dropped")
