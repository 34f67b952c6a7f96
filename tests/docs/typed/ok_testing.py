"""What tests of programs use."""

from collections.abc import Iterator
from datetime import timedelta

import pytest

from asynclock import Redlock, Store, redlock
from asynclock.stores import Clock
from asynclock.testing import FakeStore, assert_exclusive, use


@pytest.fixture
def quorum() -> Iterator[list[FakeStore]]:
    stores = [FakeStore(), FakeStore(autojump=0.5), FakeStore(autojump=None)]
    with use(*stores):
        yield stores


@redlock.synchronized("order:{order_id}")
async def pay(order_id: int) -> str:
    return f"paid {order_id}"


async def test_pay(redlock_store: FakeStore) -> None:
    store: Store = redlock_store
    clock: Clock = redlock_store.clock
    now: float = clock.now()
    redlock_store.busy("order:42")
    redlock_store.free("order:42")
    await redlock_store.advance(timedelta(minutes=1))
    await redlock_store.advance(1 + now)
    await assert_exclusive(lambda: pay(42), tasks=3)
    async with Redlock(store) as client, client("order:42"):
        redlock_store.lose("order:42")
        redlock_store.down()
        redlock_store.hang()
        redlock_store.up()
        redlock_store.restart()
