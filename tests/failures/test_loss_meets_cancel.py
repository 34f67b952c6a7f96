"""A loss and a cancel from outside meet in one block (HAZARDS A8, A9)."""

from __future__ import annotations

import asyncio
import contextlib
import time

import anyio
import pytest

from asynclock import LockLost, LockTimeout, Redlock
from tests.support.probes import end_of, watched_by
from tests.support.servers import Server
from tests.support.waiters import BRIEF, is_free

pytestmark = pytest.mark.both_loops("the loop delivers the cancel")


@pytest.mark.parametrize("outside_first", [True, False])
async def test_a8_loss_and_outside_cancel_at_once(server: Server, name: str, outside_first: bool) -> None:
    """The outside cancel wins and is not swallowed; the counts are balanced."""
    async with Redlock(server.url) as redlock:
        inside = asyncio.Event()
        counts: list[int] = []

        async def body() -> None:
            task = asyncio.current_task()
            assert task
            try:
                async with redlock(name, max_hold=BRIEF):
                    inside.set()
                    await asyncio.Event().wait()
            finally:
                counts.append(task.cancelling())

        holder = asyncio.create_task(body())
        await inside.wait()
        if outside_first:
            holder.cancel()
        else:
            (lost,) = watched_by(redlock)[0].tenures
            await end_of(lost)
            assert not holder.done()  # the loss has cancelled it, and it has not run yet
            holder.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holder
        assert counts == [1]


async def test_a8_timeouts_around_and_inside_keep_working(redlock: Redlock, name: str) -> None:
    """asyncio.timeout and anyio's scopes around and inside a block end what they should, and only that."""
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0.05), redlock(name):
            await asyncio.Event().wait()
    assert not isinstance(caught.value, LockTimeout)
    with anyio.move_on_after(0.05) as scope:
        async with redlock(name):
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    async with redlock(name) as lease:
        with anyio.move_on_after(0.02) as scope:
            await anyio.sleep_forever()
        assert scope.cancelled_caught
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await asyncio.Event().wait()
        assert lease.held
    assert await is_free(redlock, name)
    task = asyncio.current_task()
    assert task
    assert task.cancelling() == 0


@pytest.mark.parametrize("scope_first", [True, False])
async def test_a8_loss_inside_an_anyio_scope(redlock: Redlock, name: str, scope_first: bool) -> None:
    """A scope cancelled in the turn of the loss ends as cancelled; without it, LockLost comes out."""
    with anyio.CancelScope() as scope:
        async with redlock(name, max_hold=BRIEF) as lease:
            if scope_first:
                while lease.held:  # the loop is blocked: no task can have been cancelled
                    time.sleep(0.01)
                scope.cancel()
                await lease.wait_lost()
            else:
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.Event().wait()
                scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    with pytest.raises(LockLost):
        with anyio.CancelScope():
            async with redlock(name, max_hold=BRIEF):
                await anyio.sleep_forever()
    task = asyncio.current_task()
    assert task
    assert task.cancelling() == 0


async def test_a9_loss_found_by_the_holder_itself(server: Server, name: str) -> None:
    """A task whose own call finds the loss gets LockLost from it, and no CancelledError after the block."""
    async with Redlock(server.url) as redlock:
        with pytest.raises(LockLost):
            async with redlock(name, max_hold=BRIEF) as lease:
                while lease.held:  # without a turn of the loop, no watchdog comes first
                    time.sleep(0.01)
                with pytest.raises(LockLost):
                    await lease.extend()
        for _ in range(3):
            await asyncio.sleep(0)  # a stray cancel would come here
        task = asyncio.current_task()
        assert task
        assert task.cancelling() == 0


async def test_a8_an_inner_timeout_cannot_swallow_the_loss(redlock: Redlock, name: str) -> None:
    """The loss comes while a timeout inside the body is under way: the body is cancelled all the same."""
    with pytest.raises(LockLost):
        async with redlock(name, max_hold=0.1) as lease:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        try:
                            await asyncio.Event().wait()
                        finally:
                            while lease.held:  # clean-up that lasts beyond the lease
                                await asyncio.sleep(0)
