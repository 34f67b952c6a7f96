"""A transaction of a user's store that never ends: it is cancelled, and what it has done is unknown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from asynclock import QuorumUnavailable, Redlock
from asynclock._options import ANSWER_TIMEOUT
from asynclock.stores.closing import AT_MOST
from asynclock.stores.jobs import GRACE
from asynclock.stores.transactional import Step
from tests.support.fake_clock import FakeClock
from tests.support.still_clock import turns
from tests.support.user_store import DictStore, state_of
from tests.support.waiters import LIMIT, LONG, until

LEFT_BEHIND = "does not end, although it was cancelled"


class Endless(DictStore):
    """Its next transaction never ends, before or after it is `committed`. It ignores `deaf` cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.clock: FakeClock = FakeClock()
        self.hangs = False
        self.committed = False
        self.deaf = 0
        self.cancelled = 0
        self.left: tuple[Sequence[str], Step] | None = None  # what the transaction that hung did not do

    async def transact(self, keys: Sequence[str], step: Step) -> None:
        hangs, self.hangs = self.hangs, False
        if not hangs or self.committed:
            await super().transact(keys, step)
        if hangs:
            self.left = keys, step
        while hangs:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                if self.cancelled > self.deaf:
                    raise

    async def give_up(self) -> None:
        """Let the time pass after which the transaction is cancelled for the first time."""
        until = self.clock.now() + ANSWER_TIMEOUT + 2 * GRACE
        while not self.cancelled and self.clock.now() < until:
            await self.pass_time(0.5)

    async def pass_time(self, seconds: float) -> None:
        """In steps: what is due in each of them happens before the next."""
        for _ in range(int(seconds / 0.5)):
            self.clock.advance(0.5)
            await turns()


def patient(store: Endless) -> Redlock:
    return Redlock(store, node_timeout=1.0, lease=LONG, max_lease=LONG, patience=0)


async def hang(store: Endless, client: Redlock, name: str) -> None:
    """An acquire whose transaction does not end: its caller has its error after a second."""
    store.hangs = True
    asking = asyncio.create_task(client(name).acquire(timeout=0))
    await turns()
    store.clock.advance(1.0)
    with pytest.raises(QuorumUnavailable, match="did not answer"):
        await asyncio.wait_for(asking, LIMIT)


async def test_f28_a_transaction_that_never_ends_is_cancelled_and_others_go_on(name: str) -> None:
    """The store carries out one at a time. An acquire of another name gets its turn."""
    store = Endless()
    async with patient(store) as client:
        await hang(store, client, name)
        await store.give_up()
        async with asyncio.timeout(LIMIT), client(f"{name}:other"):
            pass


async def test_f28_an_acquire_that_was_cancelled_is_undone(name: str) -> None:
    """Its transaction was committed before it hung."""
    store = Endless()
    store.committed = True
    async with patient(store) as client:
        await hang(store, client, name)
        assert state_of(store, name).holds
        await store.give_up()
        await until(lambda: not state_of(store, name).holds)


async def test_f28_an_acquire_that_is_committed_after_its_undo_takes_nothing(name: str) -> None:
    """The cancel has reached the coroutine, and the transaction goes on, as in a thread."""
    store = Endless()
    async with patient(store) as client:
        await hang(store, client, name)
        await store.give_up()
        async with asyncio.timeout(LIMIT), client(name):  # comes after the undo
            pass
        assert store.left is not None
        await store.transact(*store.left)
        assert not state_of(store, name).holds


async def is_released_again(store: Endless, name: str) -> None:
    """The transaction of a release hangs until it is cancelled. Return once the hold has ended nevertheless."""
    async with patient(store) as client:
        lease = await client(name).acquire(timeout=None)
        store.hangs = True
        releasing = asyncio.create_task(lease.release())
        await turns()
        await store.give_up()
        await asyncio.wait_for(releasing, LIMIT)
        store.clock.advance(1.0)  # the pause before the second release
        await until(lambda: not state_of(store, name).holds)


async def test_f28_a_release_that_was_cancelled_is_sent_again(name: str) -> None:
    """Its transaction did nothing."""
    await is_released_again(Endless(), name)


class Obliging(Endless):
    """It returns as if all was well when it is cancelled, and has rolled back."""

    async def transact(self, keys: Sequence[str], step: Step) -> None:
        hung = self.hangs
        before = dict(self.states)
        try:
            await super().transact(keys, step)
        except asyncio.CancelledError:
            assert hung
            self.states = before


async def test_f28_a_transaction_that_returns_after_its_cancel_counts_as_unknown(name: str) -> None:
    """A release whose store swallows the cancel, and has rolled back, is sent again."""
    store = Obliging()
    store.committed = True
    await is_released_again(store, name)


@pytest.mark.usefixtures("long_closes")
@pytest.mark.parametrize("hung", ["a release", "a renewal before the release"])
async def test_f28_a_close_frees_the_name_although_a_transaction_hangs(name: str, hung: str) -> None:
    """It does not wait for the limit of the transaction, which is later than that of a close."""
    store = Endless()
    store.clock = None
    async with asyncio.timeout(LIMIT), Redlock(store, node_timeout=1.0, lease=LONG, max_lease=LONG) as client:
        lease = await client(name).acquire(timeout=None)
        store.hangs = True
        first = lease.release() if hung == "a release" else lease.extend()
        asking = [asyncio.create_task(first)]
        await turns()
        if hung != "a release":
            asking.append(asyncio.create_task(lease.release()))
            await turns()
    assert store.cancelled == 1
    assert not state_of(store, name).holds
    await asyncio.gather(*asking, return_exceptions=True)


class Slow(DictStore):
    """A transaction takes a while, and ends well."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled: list[tuple[float, float]] = []  # when they had begun, and when they were cancelled

    async def transact(self, keys: Sequence[str], step: Step) -> None:
        began = time.monotonic()
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            self.cancelled.append((began, time.monotonic()))
            raise
        await super().transact(keys, step)


async def test_f28_a_close_cancels_no_transaction_that_has_just_begun(name: str) -> None:
    """Releases that are carried out one after the other, for longer than a hung one may take. Only the end of the close
    cancels one that began after the close."""
    store = Slow()
    async with asyncio.timeout(LIMIT), Redlock(store, node_timeout=2.0, lease=LONG, max_lease=LONG) as client:
        leases = [await client(f"{name}:{each}").acquire(timeout=None) for each in range(75)]
        releasing = [asyncio.create_task(each.release()) for each in leases]
        await turns()
        closing = time.monotonic()
    early = [(began, end) for began, end in store.cancelled if end - closing < AT_MOST - 0.1]
    assert all(began < closing for began, _ in early)
    await asyncio.gather(*releasing, return_exceptions=True)


async def test_f28_the_log_says_once_that_a_transaction_goes_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It ignores the first cancels."""
    store = Endless()
    store.deaf = 4
    async with patient(store) as client:
        await hang(store, client, name)
        await store.give_up()
        assert LEFT_BEHIND not in caplog.text
        await store.pass_time(40.0)  # 5, 10 and 20 s
        assert store.cancelled == store.deaf
        assert caplog.text.count(LEFT_BEHIND) == 1
        store.deaf = 0


async def test_f28_a_transaction_that_goes_on_keeps_its_turn(name: str) -> None:
    """A store with one connection never sees a second transaction beside it. Once it ends, others begin."""
    store = Endless()
    store.deaf = 1
    async with patient(store) as client:
        await hang(store, client, name)
        await store.give_up()
        asking = asyncio.create_task(client(f"{name}:other").acquire(timeout=None))
        await turns(50)
        assert not asking.done()
        await store.pass_time(6.0)  # the next cancel
        await (await asyncio.wait_for(asking, LIMIT)).release()


async def test_f28_a_store_that_limits_its_transactions_is_left_alone(name: str) -> None:
    """None of its transactions is cancelled before the client closes."""

    class Limiting(Endless):
        limits_transactions = True

    store: Any = Limiting()
    async with patient(store) as client:
        await hang(store, client, name)
        await store.give_up()
        assert not store.cancelled
