"""`current_lease()`: the lease of the block that encloses a call, wherever that is."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from asynclock import Lock, LockLost, Redlock, current_lease
from tests.support.fake_clock import FakeClock
from tests.support.probes import entered_blocks
from tests.support.still_clock import Memory
from tests.support.waiters import LIMIT


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def client(clock: FakeClock) -> AsyncIterator[Redlock]:
    async with Redlock(Memory(clock)) as client:
        yield client


def enclosing() -> str | None:
    """The name of the lock that encloses this call."""
    lease = current_lease()
    return lease and lease.name


async def test_the_innermost_block_counts(client: Redlock) -> None:
    """Of `async with` a lock, or a lease. After each block the one around it counts again."""
    assert current_lease() is None
    async with client("outer") as outer:
        async with await client("inner").acquire(timeout=None) as inner:
            innermost = current_lease()
            assert innermost is not None
            assert (innermost.name, innermost.fence) == ("inner", inner.fence)
        assert enclosing() == outer.name
    assert current_lease() is None


async def test_a_lease_without_a_block_does_not_count(client: Redlock) -> None:
    """acquire() alone encloses nothing."""
    lease = await client("order:1").acquire(timeout=None)
    assert current_lease() is None
    await lease.release()


async def test_functions_that_run_under_a_lock(client: Redlock) -> None:
    """Those of synchronized, once and lead."""

    @client.synchronized("order:{number}")
    async def charge(number: int) -> str | None:
        return enclosing()

    @client.once("report", within=1)
    async def report() -> str | None:
        return enclosing()

    async def main(_: object) -> str | None:
        return enclosing()

    assert await charge(1) == "order:1"
    assert await report() == "report"
    assert await client.lead("scheduler", main) == "scheduler"
    assert current_lease() is None


async def test_a_child_task_has_the_lease_of_its_parent(client: Redlock) -> None:
    """While it is held; a block of the child is not the parent's."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def child() -> list[str | None]:
        seen = [enclosing()]
        async with client("child"):
            seen.append(enclosing())
            entered.set()
            await leave.wait()
        return [*seen, enclosing()]

    async with client("parent"):
        task = asyncio.create_task(child())
        await asyncio.wait_for(entered.wait(), LIMIT)
        assert enclosing() == "parent"
    leave.set()
    assert await task == ["parent", "child", None]


async def test_a_lost_lease_is_skipped(client: Redlock, clock: FakeClock) -> None:
    """By the clock: the block around it counts, although the inner one has not ended."""
    async with client("outer"):
        with pytest.raises(LockLost):
            async with client("inner", lease=3.0, renew=False, cancel_on_lost=False):
                clock.advance(5.0)
                assert enclosing() == "outer"


async def test_blocks_may_end_in_any_order(client: Redlock) -> None:
    """The block that was entered last, and is still held, counts."""
    first, second = client("first"), client("second")
    await first.__aenter__()
    await second.__aenter__()
    await first.__aexit__(None, None, None)
    assert enclosing() == "second"
    await second.__aexit__(None, None, None)
    assert current_lease() is None


async def test_a_context_remembers_no_more_than_what_it_needs(client: Redlock) -> None:
    """Its memory does not grow with the number of its blocks, and keeps no lease alive that the program dropped."""
    for number in range(50):
        async with client(f"order:{number}"):
            pass
    lock = client("dropped")
    await lock.__aenter__()
    assert entered_blocks() == 1
    with pytest.warns(ResourceWarning, match="dropped"):
        del lock
        gc.collect()
    assert current_lease() is None


async def hand_over_hand(client: Redlock, before: Lock) -> Lock:
    """Enter 200 blocks, each before the one before it is left; the last one."""
    for number in range(200):
        lock = client(f"order:{number}")
        await lock.__aenter__()
        await before.__aexit__(None, None, None)
        before = lock
    return before


async def test_blocks_that_overlap_do_not_add_up(client: Redlock) -> None:
    """Each is entered before the one before it has ended, as in hand-over-hand locking, so one is always open. The
    blocks that are open stay known, in their order."""
    first, kept = client("first"), [client(f"kept:{number}") for number in range(3)]
    for lock in (first, *kept):
        await lock.__aenter__()
    before = client("order")
    await before.__aenter__()
    before = await hand_over_hand(client, before)
    assert entered_blocks() < 60
    await before.__aexit__(None, None, None)
    for lock in reversed(kept):
        assert enclosing() == lock.name
        await lock.__aexit__(None, None, None)
    assert enclosing() == "first"
    await first.__aexit__(None, None, None)
    assert current_lease() is None


async def test_blocks_that_overlap_after_many_that_were_open(client: Redlock) -> None:
    """What a context keeps depends on the blocks that are open, and not on how many were open once."""
    some = [client(f"some:{number}") for number in range(300)]
    for lock in some:
        await lock.__aenter__()
    for lock in some[1:]:
        await lock.__aexit__(None, None, None)
    before = await hand_over_hand(client, some[0])
    assert entered_blocks() < 60
    await before.__aexit__(None, None, None)
