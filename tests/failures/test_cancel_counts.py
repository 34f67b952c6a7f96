"""The count of a task's cancels around a block whose lease is lost: cancels from before it, from outside, and its own
(HAZARDS A8, A9, A11)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from asynclock import Lease, Lock, LockLost, LockNotHeld, Redlock
from tests.support.eager_tasks import eagerly
from tests.support.probes import lose
from tests.support.waiters import BRIEF, LIMIT, is_free

pytestmark = pytest.mark.both_loops("the loop delivers the cancel")


def current() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def test_a8_a_block_in_the_clean_up_of_a_cancelled_task(redlock: Redlock, name: str) -> None:
    """The task was cancelled before it entered, and goes on with its clean-up under a lock. The loss of that lease
    raises LockLost as usual, and the cancel from before is still counted after it."""
    reached = asyncio.Event()

    async def work() -> str:
        try:
            reached.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            with pytest.raises(LockLost):
                async with redlock(name, max_hold=BRIEF):
                    await asyncio.Event().wait()
            assert current().cancelling() == 1
            await asyncio.sleep(0)
            return "cleaned up"
        return "not cancelled"

    task = asyncio.create_task(work())
    await reached.wait()
    task.cancel()
    async with asyncio.timeout(LIMIT):
        assert await task == "cleaned up"


@pytest.mark.parametrize("ending", ["cancelled", "ended"])
async def test_a11_a_block_left_in_another_task_takes_no_cancel_back(redlock: Redlock, name: str, ending: str) -> None:
    """The task that entered lives on elsewhere when the lease is lost, and is cancelled. Another task leaves the block,
    itself cancelled from outside or at its end. It neither uncancels the first task, nor takes its own cancel for the
    library's."""
    lock = redlock(name, max_hold=BRIEF)
    entered, left = asyncio.Event(), asyncio.Event()
    counts: list[int] = []

    async def enters() -> None:
        await lock.__aenter__()
        entered.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        counts.append(current().cancelling())
        await left.wait()
        counts.append(current().cancelling())

    async def leaves() -> None:
        await entered.wait()
        try:
            if ending == "cancelled":
                await asyncio.Event().wait()
        except asyncio.CancelledError as cancel:
            await lock.__aexit__(type(cancel), cancel, None)  # raises nothing of its own
            raise
        while not counts:
            await asyncio.sleep(0)
        with pytest.raises(LockLost):
            await lock.__aexit__(None, None, None)

    first, second = asyncio.create_task(enters()), asyncio.create_task(leaves())
    async with asyncio.timeout(LIMIT):
        while not counts:
            await asyncio.sleep(0)
        if ending == "cancelled":
            second.cancel()
        await asyncio.wait({second})
        left.set()
        await first
    assert second.cancelled() is (ending == "cancelled")
    if not second.cancelled():
        second.result()
    assert counts == [1, 1]


async def test_a8_an_outside_cancel_as_the_block_ends(redlock: Redlock, name: str) -> None:
    """The body swallowed the cancel of the loss, and came to its end. In that turn the task is cancelled from outside.
    The block raises that cancel, and the loss is its note."""
    after: list[str] = []

    async def work() -> None:
        try:
            async with redlock(name, max_hold=BRIEF):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                asyncio.get_running_loop().call_soon(current().cancel)
        except asyncio.CancelledError as cancel:
            after.extend(cancel.__notes__)
            raise

    task = asyncio.create_task(work())
    async with asyncio.timeout(LIMIT):
        await asyncio.wait({task})
    assert task.cancelled()
    (note,) = after
    assert "max_hold" in note


async def test_a8_a_timeout_as_the_block_ends(redlock: Redlock, name: str) -> None:
    """As above, but an asyncio.timeout around the block cancels: it raises TimeoutError, and no cancel follows."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit, redlock(name, max_hold=BRIEF):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            limit.reschedule(0)
    assert current().cancelling() == 0
    await asyncio.sleep(0)


async def closing(lock: Lock, at_the_end: Callable[[Lease], object]) -> tuple[Lease, list[str]]:
    """A task closes an async generator that is in a block. The lease; and what the close raises, with its notes."""
    raised: list[str] = []

    async def generate() -> AsyncIterator[Lease]:
        async with lock as lease:
            try:
                yield lease
            finally:
                at_the_end(lease)

    async def work() -> Lease:
        generator: Any = generate()
        lease: Lease = await anext(generator)
        try:
            await generator.aclose()
        except asyncio.CancelledError as cancel:
            raised.extend(["cancelled", *getattr(cancel, "__notes__", ())])
        return lease

    async with asyncio.timeout(LIMIT):
        return await asyncio.create_task(work()), raised


async def test_a8_a_cancel_as_a_generator_is_closed(redlock: Redlock, name: str) -> None:
    """The block of a closed generator goes on in the next turn. A cancel of that turn goes on after the release."""
    lease, raised = await closing(redlock(name), lambda _: current().cancel())
    assert raised == ["cancelled"]
    with pytest.raises(LockNotHeld):
        lease.ensure_held()
    assert await is_free(redlock, name)


@pytest.mark.parametrize("outside", [False, True])
async def test_a8_a_loss_as_a_generator_is_closed(redlock: Redlock, name: str, outside: bool) -> None:
    """The lease is lost in that turn: the cancel of the loss is taken back. A cancel from outside goes on."""

    def at_the_end(lease: Lease) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(lose, lease)
        if outside:
            loop.call_soon(current().cancel)

    _, raised = await closing(redlock(name), at_the_end)
    assert raised[:1] == (["cancelled"] if outside else [])
    assert len(raised) == (2 if outside else 0)


async def test_a9_a_body_that_finds_the_loss_itself_is_not_cancelled(redlock: Redlock, name: str) -> None:
    """The body's own call raises LockLost, and the body cleans up, which takes some awaits: no cancel follows, in the
    block or after it."""
    cleaned_up = 0
    with pytest.raises(LockLost):
        async with redlock(name, max_hold=BRIEF) as lease:
            while lease.held:  # without a turn of the loop, no watchdog comes first
                time.sleep(0.01)
            with pytest.raises(LockLost):
                await lease.extend()
            for _ in range(3):
                await asyncio.sleep(0)
                cleaned_up += 1
            assert current().cancelling() == 0
    for _ in range(3):
        await asyncio.sleep(0)
    assert cleaned_up == 3
    assert current().cancelling() == 0


async def test_a8_an_error_of_the_body_after_the_loss(redlock: Redlock, name: str) -> None:
    """The body turns the cancel of the loss into an error of its own. That error comes out, with a note, and the cancel
    is undone."""
    with pytest.raises(ZeroDivisionError) as raised:
        async with redlock(name, max_hold=BRIEF):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ZeroDivisionError from None
    assert len(raised.value.__notes__) == 1
    assert current().cancelling() == 0
    await asyncio.sleep(0)


async def test_a9_a_loss_that_an_eager_task_finds_out(redlock: Redlock, name: str) -> None:
    """An eager task (Python 3.12) runs inside a step of the task that makes it. If it finds the loss, the holder is
    cancelled while it runs, and may reach the end of its block before that cancel is delivered. The cancel does not
    come after the block."""
    lock = redlock(name, max_hold=BRIEF)
    with pytest.raises(LockLost):
        async with lock as lease:
            while lease.held:  # without a turn of the loop
                time.sleep(0.01)
            assert eagerly(lease.wait_lost()) is True
            assert current().cancelling() == 1
    for _ in range(3):
        await asyncio.sleep(0)
    assert current().cancelling() == 0


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError])
async def test_a9_the_body_raises_after_an_eager_task_found_the_loss(
    redlock: Redlock, name: str, error: type[BaseException]
) -> None:
    """As above, and the body raises an error of its own before another await: it comes out, and no CancelledError comes
    after it. (A CancelledError that the body raises is that of the loss.)"""
    caught = LockLost if error is asyncio.CancelledError else error
    with pytest.raises(caught):
        async with redlock(name, max_hold=BRIEF) as lease:
            while lease.held:  # without a turn of the loop
                time.sleep(0.01)
            assert eagerly(lease.wait_lost()) is True
            raise error
    for _ in range(3):
        await asyncio.sleep(0)
    assert current().cancelling() == 0


async def test_a8_a_cancel_from_outside_comes_with_that_of_an_eager_task(redlock: Redlock, name: str) -> None:
    """The task is cancelled in the same step: the block raises that cancel, once. The body's error is its context."""
    contexts: list[BaseException | None] = []

    async def work() -> None:
        try:
            async with redlock(name, max_hold=BRIEF) as lease:
                while lease.held:  # without a turn of the loop
                    time.sleep(0.01)
                assert eagerly(lease.wait_lost()) is True
                current().cancel()
                raise ZeroDivisionError
        except asyncio.CancelledError as cancel:
            contexts.append(cancel.__context__)
            await asyncio.sleep(0)
            raise

    task = asyncio.create_task(work())
    async with asyncio.timeout(LIMIT):
        await asyncio.wait({task})
    assert [type(each) for each in contexts] == [ZeroDivisionError]
    assert task.cancelled()
