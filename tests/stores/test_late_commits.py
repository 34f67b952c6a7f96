"""A transaction of a user's store that fails for its caller, and is carried out later all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from asynclock import QuorumUnavailable, Redlock
from asynclock.stores.transactional import Step
from tests.support.still_clock import turns
from tests.support.user_store import DictStore, state_of
from tests.support.waiters import LIMIT, LONG


class Late(DictStore):
    """Its next transaction is not carried out before the test says so. It `fails` meanwhile, or hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.is_late = False
        self.fails = False
        self.left: tuple[Sequence[str], Step] | None = None

    async def transact(self, keys: Sequence[str], step: Step) -> None:
        is_late, self.is_late = self.is_late, False
        if not is_late:
            await super().transact(keys, step)
            return
        self.left = keys, step
        if self.fails:
            raise ConnectionError("lost while it was committed")
        await asyncio.Event().wait()

    async def carry_out(self) -> None:
        """What was late."""
        assert self.left is not None
        await super().transact(*self.left)


def patient(store: Late) -> Redlock:
    return Redlock(store, node_timeout=LIMIT, lease=3 * LONG, max_lease=3 * LONG, patience=0)


async def used(client: Redlock, name: str) -> None:
    """The name is free again: the undo has been carried out."""
    async with asyncio.timeout(LIMIT), client(name):
        pass


async def test_c3_an_acquire_whose_commit_comes_after_its_error_takes_nothing(name: str) -> None:
    """The connection was lost during the commit. The undo goes over another one, and finds nothing to remove."""
    store = Late()
    store.fails = True
    async with patient(store) as client:
        store.is_late = True
        with pytest.raises(QuorumUnavailable, match="lost while it was committed"):
            await client(name).acquire(timeout=0)
        await used(client, name)
        await store.carry_out()
        assert not state_of(store, name).holds


async def test_c3_an_acquire_whose_task_was_cancelled_takes_nothing_later(name: str) -> None:
    """The program cancels the tasks of its loop, and that of the transaction is among them."""
    store = Late()
    async with patient(store) as client:
        store.is_late = True
        before = asyncio.all_tasks()
        asking = asyncio.create_task(client(name).acquire(timeout=0))
        await turns()
        assert store.left is not None
        for task in asyncio.all_tasks() - before - {asking}:
            task.cancel()
        with pytest.raises(QuorumUnavailable, match="cancelled"):
            await asyncio.wait_for(asking, LIMIT)
        await used(client, name)
        await store.carry_out()
        assert not state_of(store, name).holds
